"""A checkpoint: the spec and the weights of a model, the same whichever container holds them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.model.container import Container, StoredTensor
from muser_wire.model.encodings import AffineWeight, decode_affine, decode_f32
from muser_wire.model.families import family_of
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.gguf import is_gguf, open_gguf
from muser_wire.model.safetensors import open_folder
from muser_wire.model.spec import ModelSpec

# How many tensor names an error message lists.
SHOWN_NAMES = 4


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor under its canonical name. Nothing is decoded until a method asks for it."""

    entry: TensorEntry
    stored: StoredTensor

    @property
    def name(self) -> str:
        """The canonical name, such as "layers.0.attn.q.weight"."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, rows first."""
        return self.entry.shape

    @property
    def encoding(self) -> str:
        """How the file stores it, such as "Q4_1", "BF16" or "F32"."""
        return self.stored.encoding

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.stored.data.size)

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def f32(self) -> npt.NDArray[np.float32]:
        """Return the values as a new C-contiguous float32 array, with every storage convention undone."""
        values = decode_f32(self.encoding, self.stored.data, self.shape)
        return values if self._rows is None else values[self._rows]

    def affine(self) -> AffineWeight | None:
        """Return the packed form with its rows in canonical order, or None where the encoding has none."""
        packed = decode_affine(self.encoding, self.stored.data, self.shape)
        if packed is None or self._rows is None:
            return packed
        rows = self._rows
        return AffineWeight(packed.bits, packed.q[rows], packed.scales[rows], packed.offsets[rows])

    @property
    def _rows(self) -> npt.NDArray[np.intp] | None:
        """The stored row of each canonical row, or None when they are the same."""
        heads = self.entry.interleaved_heads
        return rotate_half_rows(heads, self.shape[0] // heads) if heads else None


def rotate_half_rows(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Return, for each row in rotate-half order, its index in interleaved order.

    Interleaved order keeps the pair i of a head at rows 2i and 2i + 1, rotate-half order at i and
    i + head_dim / 2.

    >>> rotate_half_rows(heads=1, head_dim=6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class Checkpoint:
    """An opened model. Every tensor that the family lists is there, with its shape, and no other."""

    def __init__(self, path: Path, spec: ModelSpec, weights: tuple[Weight, ...]) -> None:
        self.path = path
        self.spec = spec
        self._weights = {weight.name: weight for weight in weights}

    @property
    def encoding(self) -> str:
        """The encoding of most weights, shown to people."""
        counts: Counter[str] = Counter()
        for weight in self._weights.values():
            counts[weight.encoding] += weight.count
        return counts.most_common(1)[0][0]

    def names(self) -> tuple[str, ...]:
        """Return the tensor names in canonical order: embedding, layers ascending, final norm, head."""
        return tuple(self._weights)

    def weight(self, name: str) -> Weight:
        """Return one tensor by its canonical name.

        Raises:
            CheckpointError: the model has no such tensor.
        """
        if name not in self._weights:
            raise CheckpointError(f"{self.path}: this model has no tensor {name}")
        return self._weights[name]


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the model in a GGUF file or a Hugging Face folder. Weights are mapped, not read.

    Raises:
        CheckpointError: naming the file and what is wrong: it is not there, not a model, cut short, of
            an unknown architecture, or a tensor is missing, misshapen or not part of the model.
    """
    container = _open_container(path)
    family = family_of(container)
    spec = family.spec(container)
    return Checkpoint(path, spec, _bind(container, family.entries(spec, container.kind)))


def _open_container(path: Path) -> Container:
    try:
        if path.is_dir():
            return open_folder(path)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; `muser model fetch smollm2` fetches a model to start with")
        # An empty file is told by the mapping, with the advice to fetch it again.
        if path.stat().st_size == 0 or is_gguf(path):
            return open_gguf(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    raise CheckpointError(f"{path} is neither a GGUF file nor a folder with config.json and .safetensors files")


def _bind(container: Container, entries: tuple[TensorEntry, ...]) -> tuple[Weight, ...]:
    """Return the weights of a model after checking the container's tensors against the family's list."""
    sources = {entry.source for entry in entries}
    missing = [entry.source for entry in entries if entry.source not in container.tensors]
    extra = [name for name in container.tensors if name not in sources]
    if missing:
        raise CheckpointError(f"{container.path}: missing {_listed(missing)}")
    if extra:
        raise CheckpointError(f"{container.path}: {_listed(extra)} not part of this model; nothing would read them")
    for entry in entries:
        stored = container.tensors[entry.source]
        if stored.shape != entry.shape:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, expected {list(entry.shape)}"
            )
    return tuple(Weight(entry, container.tensors[entry.source]) for entry in entries)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN_NAMES])}{more}"
