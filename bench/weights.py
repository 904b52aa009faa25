"""The same weights for every contestant: one checkpoint, written in the containers that the peers read."""

from __future__ import annotations

import struct
from pathlib import Path

from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from bench.driver import BenchError
from muser_wire.model.container import StoredTensor
from muser_wire.model.gguf import open_gguf

ALIGNMENT = 32
"""GGUF's default, in bytes. A file that says otherwise is not re-encoded."""


def reencode(source: Path, target: Path, encoding: str) -> None:
    """Write a GGUF file with the metadata of `source` and its matrices in another encoding. Vectors stay as they are.

    Raises:
        BenchError: `source` has an alignment of its own.
    """
    container = open_gguf(source)
    tensors = list(container.tensors.values())
    metadata = _metadata(source, tensors[0])
    if b"general.alignment" in metadata:
        raise BenchError(f"{source} has an alignment of its own")
    entries, offset, blobs = b"", 0, []
    for tensor in tensors:
        kind, data = _encoded(tensor, GGMLQuantizationType[encoding])
        entries += _entry(tensor, kind, offset)
        blobs.append(data + b"\0" * (-len(data) % ALIGNMENT))
        offset += len(blobs[-1])
    head = metadata + entries
    with target.open("wb") as out:
        out.write(head + b"\0" * (-len(head) % ALIGNMENT))
        out.writelines(blobs)


def _metadata(source: Path, first: StoredTensor) -> bytes:
    """Return everything before the first tensor's entry, which begins with its name."""
    data = source.read_bytes()
    end = data.index(_text(first.name) + struct.pack("<I", len(first.shape)))
    return data[:end]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _entry(tensor: StoredTensor, kind: GGMLQuantizationType, offset: int) -> bytes:
    # GGUF lists the fastest axis first.
    shape = tensor.shape[::-1]
    return _text(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind.value, offset)


def _encoded(tensor: StoredTensor, encoding: GGMLQuantizationType) -> tuple[GGMLQuantizationType, bytes]:
    stored = GGMLQuantizationType[tensor.encoding]
    if len(tensor.shape) == 1:
        return stored, tensor.data.tobytes()
    values = dequantize(tensor.data.reshape(tensor.shape[0], -1), stored)
    return encoding, quantize(values, encoding).tobytes()
