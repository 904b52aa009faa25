"""What the two containers have in common: fields, and tensors as mapped bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.model.fields import Fields

# Both containers hold plain matrices; 8 leaves room for convolutions and refuses nonsense.
MAX_DIMENSIONS = 8
# 2^40 weights are ten times the largest published model; sizes in bytes then fit 64 bits.
MAX_ELEMENTS = 1 << 40


class ContainerKind(Enum):
    """How a checkpoint is packed. A family names tensors differently in each."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor as a file holds it. `data` is its mapped bytes, 1-D uint8, whose length was checked."""

    name: str
    path: Path
    shape: tuple[int, ...]
    encoding: str
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Container:
    """An opened checkpoint before any family has read it. `path` is the file, or the folder."""

    path: Path
    kind: ContainerKind
    fields: Fields
    tensors: Mapping[str, StoredTensor]


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
