"""GGUF files: the metadata section parsed here, tensor bytes mapped.

The `gguf` package's own reader builds one array per string and takes 19 s for a vocabulary; this
one walks the section once. Every count and length is checked against what is left of the file
before anything of that size is made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from muser_wire.errors import CheckpointError
from muser_wire.model.composed import ScaledTensor
from muser_wire.model.container import Container, ContainerKind, StoredTensor, Tensor, element_count, map_file
from muser_wire.model.encodings import block_size
from muser_wire.model.fields import Fields

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# The largest alignment that a writer could have a use for: a huge page.
MAX_ALIGNMENT = 1 << 21
# GGUF allows four dimensions.
MAX_GGUF_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TYPE_STRING = 8
_TYPE_ARRAY = 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# The shortest entries: a field is a name's length, a type and one byte; a tensor has a name's length,
# a rank, one dimension, a type and an offset. They bound how many a file of a given size can hold.
_MIN_FIELD_NBYTES = 8 + 4 + 1
_MIN_TENSOR_NBYTES = 8 + 4 + 8 + 4 + 8


def is_gguf(path: Path) -> bool:
    """Tell whether a readable file starts as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> Container:
    """Return the fields and tensors of a GGUF file. Tensor bytes are mapped, not read.

    Raises:
        CheckpointError: the file is not GGUF, is cut short or contradicts itself.
    """
    data = map_file(path)
    cursor, tensor_count, values = _read_metadata(path, data)
    fields = Fields(path, values)
    entries = [cursor.tensor() for _ in range(tensor_count)]
    tensors: dict[str, StoredTensor] = {}
    start = _data_start(fields, cursor.at)
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(f"{path}: tensor {entry.name} is there twice")
        tensors[entry.name] = _stored(path, data, start, entry)
    return Container(path, ContainerKind.GGUF, fields, _with_scales(path, tensors))


def _with_scales(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the tensors after giving each NVFP4 matrix X.weight its factor X.scale.

    A file made from another NVFP4 checkpoint has one for each matrix, a file quantised directly has none.
    """
    bases = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.encoding == "NVFP4"]
    if not any(f"{base}.scale" in tensors for base in bases):
        return dict(tensors)
    whole: dict[str, Tensor] = dict(tensors)
    for base in bases:
        scale = whole.pop(f"{base}.scale", None)
        if scale is None:
            raise CheckpointError(f"{path}: tensor {base}.weight is quantised, and its {base}.scale is missing")
        if scale.shape != (1,):
            raise CheckpointError(f"{path}: tensor {base}.scale has shape {list(scale.shape)}; expected one number")
        whole[f"{base}.weight"] = ScaledTensor(f"{base}.weight", tensors[f"{base}.weight"], float(scale.f32(0, 1)[0]))
    return whole


def read_gguf_fields(path: Path) -> Fields:
    """Return the metadata of a GGUF file alone.

    Raises:
        CheckpointError: as `open_gguf`.
    """
    return Fields(path, _read_metadata(path, map_file(path))[2])


class TypedField(NamedTuple):
    """A metadata field as it can be written again: `kind` and, of an array, `item_kind` are GGUF's type numbers."""

    name: str
    kind: int
    item_kind: int | None
    value: object


def read_typed_fields(path: Path) -> list[TypedField]:
    """Return the metadata of a GGUF file with its types, in file order.

    Raises:
        CheckpointError: as `open_gguf`.
    """
    cursor = _Cursor(path, map_file(path))
    cursor.take(len(MAGIC) + 4)
    cursor.count(_MIN_TENSOR_NBYTES, "tensors")
    fields = []
    for _ in range(cursor.count(_MIN_FIELD_NBYTES, "fields")):
        name, start = cursor.text(), cursor.at
        kind, item_kind = cursor.u32(), cursor.u32()
        cursor.at = start
        fields.append(TypedField(name, kind, item_kind if kind == _TYPE_ARRAY else None, cursor.value(name)))
    return fields


def _read_metadata(path: Path, data: npt.NDArray[np.uint8]) -> tuple[_Cursor, int, dict[str, object]]:
    """Return a cursor at the first tensor entry, the number of tensors, and the fields."""
    cursor = _Cursor(path, data)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF")
    version = cursor.u32()
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not one of {VERSIONS}, or the file is big-endian")
    tensor_count = cursor.count(_MIN_TENSOR_NBYTES, "tensors")
    field_count = cursor.count(_MIN_FIELD_NBYTES, "fields")
    values: dict[str, object] = {}
    for _ in range(field_count):
        name = cursor.text()
        if name in values:
            raise CheckpointError(f"{path}: field {name} is there twice")
        values[name] = cursor.value(name)
    if values.get("split.count") not in (None, 0, 1):
        raise CheckpointError(f"{path}: split.count is {values['split.count']}: merge the parts into one file first")
    return cursor, tensor_count, values


def _data_start(fields: Fields, metadata_end: int) -> int:
    """Return the offset of the data section: the end of the metadata, rounded up to the alignment."""
    alignment = fields.integer("general.alignment", at_most=MAX_ALIGNMENT, default=DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise fields.refusal("general.alignment", f"is {alignment}; expected a power of two")
    return -(-metadata_end // alignment) * alignment


class _Entry(NamedTuple):
    """A tensor as the metadata section lists it. `shape` has the slowest axis first."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _stored(path: Path, data: npt.NDArray[np.uint8], data_start: int, entry: _Entry) -> StoredTensor:
    """Return one tensor after checking that its type can be read and its bytes are in the file."""
    name, shape, _, _ = entry
    try:
        encoding = GGMLQuantizationType(entry.kind)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name} has the unknown type {entry.kind}") from error
    if block_size(encoding.name) is None:
        raise CheckpointError(f"{path}: tensor {name} is stored as {encoding.name}, which cannot be read as weights")
    weights, nbytes = GGML_QUANT_SIZES[encoding]
    count = element_count(path, name, shape)
    if shape[-1] % weights:
        raise CheckpointError(f"{path}: tensor {name} has rows of {shape[-1]}; {encoding.name} packs {weights} at once")
    start = data_start + entry.offset
    stop = start + count // weights * nbytes
    if stop > data.size:
        raise CheckpointError(
            f"{path}: tensor {name} needs bytes {start} to {stop}, the file has {data.size}: "
            "it was cut short, fetch it again"
        )
    return StoredTensor(name, path, shape, encoding.name, data[start:stop])


class _Cursor:
    """A place in the metadata section. Each read is checked against the end of the file."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._data = data.data
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes and step over them."""
        if nbytes > len(self._data) - self.at:
            raise self._cut_short(nbytes)
        start, self.at = self.at, self.at + nbytes
        return bytes(self._data[start : self.at])

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def count(self, item_nbytes: int, what: str) -> int:
        """Return a count of items of at least `item_nbytes` each, after checking that so many can follow."""
        count = self.u64()
        if count * item_nbytes > len(self._data) - self.at:
            raise CheckpointError(
                f"{self._path}: {count} {what} are announced, {len(self._data) - self.at} bytes follow: "
                "the file was cut short or damaged"
            )
        return count

    def text(self) -> str:
        return self._decoded(self.take(self.u64()))

    def value(self, name: str) -> object:
        """Return the value of the field `name`: a plain value, a list of text, or an array of numbers."""
        kind = self.u32()
        if kind == _TYPE_STRING:
            return self.text()
        if kind == _TYPE_ARRAY:
            return self._array(name)
        scalar = self._scalar(name, kind)
        return scalar.unpack(self.take(scalar.size))[0]

    def tensor(self) -> _Entry:
        """Return the next tensor entry."""
        name = self.text()
        rank = self.u32()
        if not 1 <= rank <= MAX_GGUF_DIMENSIONS:
            raise CheckpointError(f"{self._path}: tensor {name} has {rank} dimensions; GGUF allows 1 to 4")
        shape = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        return _Entry(name, shape[::-1], kind=self.u32(), offset=self.u64())

    def _array(self, name: str) -> object:
        kind = self.u32()
        if kind == _TYPE_STRING:
            return self._strings(self.count(8, f"entries of {name}"))
        item = self._scalar(name, kind)
        count = self.count(item.size, f"entries of {name}")
        return np.frombuffer(self.take(count * item.size), dtype=item.format).tolist()

    def _strings(self, count: int) -> list[str]:
        """Return `count` strings. A vocabulary has 10^5 of them, so the loop keeps to local names."""
        data, at, end = self._data, self.at, len(self._data)
        unpack: Callable[[memoryview, int], tuple[int]] = _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            if end - at < 8:
                raise self._cut_short(8)
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise self._cut_short(at - start)
            found.append(self._decoded(data[start:at]))
        self.at = at
        return found

    def _decoded(self, text: bytes | memoryview) -> str:
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: a text in the metadata is not UTF-8: {error.reason}") from error

    def _scalar(self, name: str, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: field {name} has the unknown type {kind}")
        return _SCALARS[kind]

    def _cut_short(self, nbytes: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: the metadata needs {nbytes} bytes at {self.at}, the file ends at {len(self._data)}: "
            "it was cut short, fetch it again"
        )
