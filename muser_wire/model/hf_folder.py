"""A checkpoint written as a Hugging Face folder in F32: the weights of any container, for reference implementations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import family_of
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.families.tensors import NESTED_PREFIXES
from muser_wire.model.fields import Fields
from muser_wire.model.hf_config import hf_config

BLOCK_NBYTES = 32 << 20
"""How much of a tensor is in memory at a time."""


def write_folder(checkpoint: Checkpoint, out: Path) -> None:
    """Write config.json and model.safetensors of a checkpoint into the folder `out`: no tokenizer, no template.

    Raises:
        CheckpointError: the format cannot say what this model is.
        OSError: the folder cannot be written.
    """
    config = hf_config(checkpoint.spec)
    container = Container(out / "config.json", ContainerKind.SAFETENSORS, Fields(out / "config.json", config), {})
    family = family_of(container)
    if family.spec(container) != checkpoint.spec:
        raise CheckpointError(
            f"{checkpoint.path}: no Hugging Face config describes this {checkpoint.spec.family} model"
        )
    entries = family.entries(checkpoint.spec, container)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    with (out / "model.safetensors").open("wb") as file:
        file.write(_header(entries, config))
        for entry in entries:
            file.writelines(_blocks(checkpoint, entry))


def _header(entries: tuple[TensorEntry, ...], config: dict[str, Any]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        nbytes = 4
        for size in entry.shape:
            nbytes *= size
        name = _nested(entry.source) if "text_config" in config else entry.source
        header[name] = {"dtype": "F32", "shape": list(entry.shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data section starts on a multiple of 8, so that readers can map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _nested(source: str) -> str:
    return NESTED_PREFIXES[0] + source.removeprefix("model.") if source.startswith("model.") else source


def _blocks(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[bytes]:
    weight = checkpoint.weight(entry.name)
    rows = entry.shape[0]
    step = max(1, BLOCK_NBYTES * rows // (4 * weight.count))
    for start in range(0, rows, step):
        values = weight.f32(start, min(start + step, rows))
        if entry.centred:
            values -= 1
        yield values.astype("<f4").tobytes()
