"""The same tiny checkpoint as a GGUF file, in any encoding that the `gguf` package can write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter, quantize

from muser_wire.model.checkpoint import Weight, open_checkpoint
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import FAMILIES
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.fields import Fields
from muser_wire.model.gguf_conventions import add_conventions, add_geometry, interleaved
from muser_wire.model.jsonfile import read_object


def write_tiny_gguf(out: Path, folder: Path, *, encoding: str = "F32") -> None:
    """Write the checkpoint that `write_tiny` made in `folder` as the GGUF file `out`.

    Matrices are stored as `encoding`, such as "Q4_1", vectors as F32, all with the conventions that
    real files of the family have. With F32 it is the same model in every bit.
    """
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    family = next(family for family in FAMILIES if family.name == spec.family)
    writer = GGUFWriter(out, family.gguf_architecture)
    add_geometry(writer, spec)
    add_conventions(writer, spec)
    _add_tokenizer(writer, folder)
    container = Container(out, ContainerKind.GGUF, Fields(out, {}), {})
    for entry in family.entries(spec, container):
        _add_tensor(writer, entry, checkpoint.weight(entry.name), GGMLQuantizationType[encoding])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: GGUFWriter, entry: TensorEntry, weight: Weight, kind: GGMLQuantizationType) -> None:
    values = weight.f32()
    if entry.interleaved_heads:
        values = interleaved(values, entry.interleaved_heads)
    if values.ndim == 1 or kind is GGMLQuantizationType.F32:
        writer.add_tensor(entry.source, values)
    else:
        writer.add_tensor(entry.source, quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    content = read_object(folder / "tokenizer.json")
    config: dict[str, Any] = read_object(folder / "tokenizer_config.json")
    ids: dict[str, int] = content["model"]["vocab"]
    control = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    ends = read_object(folder / "config.json")["eos_token_id"]
    if isinstance(ends, list):
        writer.add_eot_token_id(ends[1])
    writer.add_add_bos_token(config["add_bos_token"])
    writer.add_chat_template(config["chat_template"])
