"""The same tiny checkpoint as a GGUF file, in any encoding that the `gguf` package can write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from muser_wire.model.checkpoint import Weight, open_checkpoint, rotate_half_rows
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import FAMILIES
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.fields import Fields
from muser_wire.model.jsonfile import read_object
from muser_wire.model.spec import Llama3Scaling, ModelSpec, RopeSpec


def write_tiny_gguf(out: Path, folder: Path, *, encoding: str = "F32") -> None:
    """Write the checkpoint that `write_tiny` made in `folder` as the GGUF file `out`.

    Matrices are stored as `encoding`, such as "Q4_1", vectors as F32, all with the conventions that
    real files of the family have. With F32 it is the same model in every bit.
    """
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    family = next(family for family in FAMILIES if family.name == spec.family)
    writer = GGUFWriter(out, family.gguf_architecture)
    _add_geometry(writer, spec)
    _add_conventions(writer, spec)
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
        values = _interleave(values, entry.interleaved_heads)
    if values.ndim == 1 or kind is GGMLQuantizationType.F32:
        writer.add_tensor(entry.source, values)
    else:
        writer.add_tensor(entry.source, quantize(values, kind), raw_dtype=kind)


def _interleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return rows whose pairs (i, i + head_dim / 2) of each head now stand side by side."""
    stored = np.empty_like(rows)
    stored[rotate_half_rows(heads, rows.shape[0] // heads)] = rows
    return stored


def _add_geometry(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def _add_conventions(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add what families write down in different ways: positions, windows, constants."""
    arch, layers = writer.arch, spec.layers
    ropes = {layer.window: layer.rope for layer in layers}
    # Gemma's file holds the base of full layers, Muse Glimmer's that of the sliding ones, which alone have any.
    rope = ropes.get(None) or next(iter(ropes.values()))
    if rope is not None:
        writer.add_rope_freq_base(rope.theta)
        _add_llama3_divisors(writer, rope)
    windows = [layer.window for layer in layers if layer.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
        if spec.family != "llama":
            pattern = [layer.window is not None for layer in layers]
            writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
    if spec.family == "gemma3":
        writer.add_attention_scale(spec.attention_scale)
    if spec.logit_scale != 1.0:
        writer.add_logit_scale(spec.logit_scale)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.qk_norm is not None and not spec.qk_norm.weighted:
        queries = np.float32(spec.attention_scale * math.sqrt(spec.head_dim))
        for i in range(len(layers)):
            for part, value in (("q", queries), ("k", np.float32(1))):
                writer.add_tensor(f"blk.{i}.attn_{part}_norm.weight", np.full(spec.head_dim, value, np.float32))


def _add_llama3_divisors(writer: GGUFWriter, rope: RopeSpec) -> None:
    if isinstance(rope.scaling, Llama3Scaling):
        plain = np.array(RopeSpec(rope.theta, rope.rotary_dim).inverse_frequencies())
        writer.add_tensor("rope_freqs.weight", (plain / np.array(rope.inverse_frequencies())).astype(np.float32))


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
