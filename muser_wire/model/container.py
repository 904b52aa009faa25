"""What the two containers have in common: fields, and tensors over mapped bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.model.blockscaled import BlockScaledWeight
from muser_wire.model.encodings import AffineWeight, decode_affine, decode_f32
from muser_wire.model.fields import Fields

# Both containers hold plain matrices; 8 leaves room for convolutions and refuses nonsense.
MAX_DIMENSIONS = 8
# 2^40 weights are ten times the largest published model; sizes in bytes then fit 64 bits.
MAX_ELEMENTS = 1 << 40


class ContainerKind(Enum):
    """How a checkpoint is packed. A family names tensors differently in each."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


class Tensor(Protocol):
    """A tensor of a checkpoint in whatever form: what a weight is read from."""

    @property
    def name(self) -> str:
        """Its name in the container."""

    @property
    def path(self) -> Path:
        """The file that holds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values, rows first."""

    @property
    def encoding(self) -> str:
        """How the file stores it, as shown to people."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""

    @property
    def tensor_scale(self) -> float | None:
        """The float32 factor of the whole tensor, where its encoding keeps one apart."""

    def f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) as a new C-contiguous float32 array."""

    def affine(self) -> AffineWeight | None:
        """Return the packed affine form, or None where the encoding has none."""

    def block_scaled(self) -> BlockScaledWeight | None:
        """Return the packed block-scaled form, or None where the encoding has none."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor as a file holds it. `data` is its mapped bytes, 1-D uint8, whose length was checked."""

    name: str
    path: Path
    shape: tuple[int, ...]
    encoding: str
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.size)

    @property
    def tensor_scale(self) -> float | None:
        """None: one array has no scale beside it."""
        return None

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of rows [start, stop) of a matrix, `[rows, bytes]`: no block reaches over a row's end."""
        return self.data.reshape(self.shape[0], -1)[start:stop]

    def f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) as a new C-contiguous float32 array."""
        if len(self.shape) == 1:
            # A block may span several rows of a vector.
            return decode_f32(self.encoding, self.data, self.shape)[start:stop]
        return decode_f32(self.encoding, self.rows(start, stop), (stop - start, *self.shape[1:]))

    def affine(self) -> AffineWeight | None:
        """Return the packed affine form, or None where the encoding has none."""
        return decode_affine(self.encoding, self.data, self.shape)

    def block_scaled(self) -> BlockScaledWeight | None:
        """Return None: codes and scales are two arrays."""
        return None


@dataclass(frozen=True)
class Container:
    """An opened checkpoint before any family has read it. `path` is the file, or the folder."""

    path: Path
    kind: ContainerKind
    fields: Fields
    tensors: Mapping[str, Tensor]


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a file as a read-only map, so that only what is read occupies memory.

    Raises:
        CheckpointError: the file is empty or cannot be read.
    """
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty: fetch it again, for example with `muser model fetch smollm2`")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def element_count(path: Path, name: str, shape: tuple[int, ...]) -> int:
    """Return the number of weights of a tensor after checking that its declared shape is possible."""
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: tensor {name} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} make sense")
    count = math.prod(shape)
    if any(size < 1 for size in shape) or count > MAX_ELEMENTS:
        raise CheckpointError(f"{path}: tensor {name} has the impossible shape {list(shape)}")
    return count
