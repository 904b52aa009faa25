"""Hugging Face folders: config.json beside one or several safetensors files.

A safetensors file is an 8-byte length, a JSON header and the tensors' bytes. The header is read
here because the `safetensors` package cannot hand bfloat16 to numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.model.container import Container, ContainerKind, StoredTensor, element_count, map_file
from muser_wire.model.fields import Fields
from muser_wire.model.jsonfile import parse_object, read_object
from muser_wire.model.quantised import compose

# As the format's own reader has it; a header of a thousand layers takes 1 MB.
MAX_HEADER_NBYTES = 100_000_000
ITEM_NBYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def open_folder(path: Path) -> Container:
    """Return the config and tensors of a Hugging Face folder. Tensor bytes are mapped, not read.

    The arrays of a quantised weight are one tensor, under the name that the weight has elsewhere.

    Raises:
        CheckpointError: a file is missing, cut short or contradicts itself.
    """
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(
            f"{path} has no config.json, so it is not a model folder; "
            "give a folder that has one, a .gguf file, or run `muser model fetch smollm2`"
        )
    fields = Fields(config_path, read_object(config_path))
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(path):
        for name, tensor in read_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    return Container(path, ContainerKind.SAFETENSORS, fields, compose(fields, tensors))


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up a checkpoint, in name order."""
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder / INDEX_FILE)
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has a config.json but no .safetensors file: fetch the weights too")
    return files


def _indexed_files(index_path: Path) -> list[Path]:
    """Return the files that an index names, after checking that each is there, beside the index."""
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    names = set()
    for tensor, name in weight_map.items():
        # A name with a path in it could lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path}: tensor {tensor} lies in {name!r}, which is not a plain file name")
        names.add(name)
    files = [index_path.parent / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {index_path.name} names it: fetch the model again")
    return files


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name. Together they must cover its data section exactly.

    Raises:
        CheckpointError: the file is cut short or its header contradicts it.
    """
    data = map_file(path)
    header, start = _header(path, data)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        encoding, shape, first, last = _entry(path, name, entry)
        if start + last > data.size:
            raise CheckpointError(
                f"{path}: tensor {name} needs bytes {start + first} to {start + last}, the file has {data.size}: "
                "it was cut short, fetch it again"
            )
        tensors[name] = StoredTensor(name, path, shape, encoding, data[start + first : start + last])
        spans.append((first, last, name))
    _check_cover(path, spans, data.size - start)
    return tensors


def _header(path: Path, data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset of the data section."""
    if data.size < 8:
        raise CheckpointError(f"{path} has {data.size} bytes: too short for a safetensors header, fetch it again")
    nbytes = int.from_bytes(data[:8].tobytes(), "little")
    if nbytes > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{path}: the header claims {nbytes} bytes, at most {MAX_HEADER_NBYTES} are allowed: "
            "not a safetensors file, or damaged"
        )
    if nbytes > data.size - 8:
        raise CheckpointError(
            f"{path}: the header claims {nbytes} bytes, the file has {data.size}: it was cut short, fetch it again"
        )
    return parse_object(path, data[8 : 8 + nbytes].tobytes()), 8 + nbytes


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return encoding, shape, first and last byte of one header entry, checked against each other."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the header entry of tensor {name} is not an object")
    encoding, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name} has a malformed shape or data_offsets")
    if encoding not in ITEM_NBYTES:
        raise CheckpointError(f"{path}: tensor {name} is stored as {encoding}, which is not known here")
    expected = element_count(path, name, tuple(shape)) * ITEM_NBYTES[encoding]
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"{path}: tensor {name} {encoding} {shape} takes {expected} bytes, "
            f"its data_offsets give {offsets[1] - offsets[0]}"
        )
    return encoding, tuple(shape), offsets[0], offsets[1]


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(path: Path, spans: list[tuple[int, int, str]], data_nbytes: int) -> None:
    """Check that tensors neither overlap nor leave a gap: either means that header and data are strangers."""
    at = 0
    for first, last, name in sorted(spans):
        if first != at:
            raise CheckpointError(f"{path}: tensor {name} starts at data byte {first}, expected {at}")
        at = last
    if at != data_nbytes:
        raise CheckpointError(f"{path}: the tensors take {at} bytes of data, the file has {data_nbytes}")
