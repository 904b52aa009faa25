"""A checkpoint: the spec and the weights of a model, the same whichever container holds them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.model.blockscaled import BlockScaledWeight
from muser_wire.model.container import Container, StoredTensor, Tensor
from muser_wire.model.encodings import AffineWeight, block_size
from muser_wire.model.families import family_of
from muser_wire.model.families.description import Family, TensorEntry
from muser_wire.model.gguf import is_gguf, open_gguf
from muser_wire.model.safetensors import open_folder
from muser_wire.model.spec import ModelSpec

Form = TypeVar("Form", AffineWeight, BlockScaledWeight)

# How many tensor names an error message lists.
SHOWN_NAMES = 4


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor under its canonical name. Nothing is decoded until a method asks for it."""

    entry: TensorEntry
    stored: Tensor

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
        """Bytes in the file, scales included."""
        return self.stored.nbytes

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def tensor_scale(self) -> float | None:
        """The float32 factor of the whole tensor, where the encoding keeps one apart; `f32` has it applied."""
        return self.stored.tensor_scale

    def f32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) as a new C-contiguous float32 array, with every storage convention undone.

        Row by row a large matrix can be loaded without ever being whole in float32.
        """
        stop = self.shape[0] if stop is None else stop
        if self._rows is not None:
            # Rows change places within a head, so only the heads that the slice touches are decoded.
            head_dim = self.shape[0] // self.entry.interleaved_heads
            first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
            return self.stored.f32(first, last)[self._rows[start:stop] - first]
        values = self.stored.f32(start, stop)
        if self.entry.centred:
            values += np.float32(1)
        return values

    def affine(self) -> AffineWeight | None:
        """Return the packed form with its rows in canonical order, or None where the encoding has none."""
        return self._in_order(self.stored.affine())

    def block_scaled(self) -> BlockScaledWeight | None:
        """Return the form that MLX's nvfp4, mxfp4 and mxfp8 modes take, or None for other encodings."""
        return self._in_order(self.stored.block_scaled())

    def _in_order(self, packed: Form | None) -> Form | None:
        """Return a packed form with its rows in canonical order."""
        return packed if packed is None or self._rows is None else packed.reordered(self._rows)

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
    """An opened model. Every tensor that the family lists is there, with its shape.

    `asides` counts, by what they are, the tensors that the family knows and a decoder does not read.
    A file with any other tensor is not opened.
    """

    def __init__(
        self, path: Path, spec: ModelSpec, weights: tuple[Weight, ...], asides: Mapping[str, int] | None = None
    ) -> None:
        self.path = path
        self.spec = spec
        self.asides: dict[str, int] = dict(asides or {})
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
    entries = family.entries(spec, container)
    asides = _asides(container, family, entries)
    return Checkpoint(path, spec, _bind(container, entries), asides)


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


def _asides(container: Container, family: Family, entries: tuple[TensorEntry, ...]) -> Counter[str]:
    """Return how many tensors of each kind stay aside, after checking that nothing is left over."""
    sources = {entry.source for entry in entries}
    missing = [entry.source for entry in entries if entry.source not in container.tensors]
    if missing:
        raise CheckpointError(f"{container.path}: missing {_listed(missing)}")
    counts: Counter[str] = Counter()
    extra = []
    for name in container.tensors:
        if name not in sources:
            what = next((aside.what for aside in family.asides if aside.pattern.fullmatch(name)), None)
            if what is None:
                extra.append(name)
            else:
                counts[what] += 1
    if extra:
        raise CheckpointError(f"{container.path}: {_listed(extra)} not part of this model; nothing would read them")
    return counts


def _bind(container: Container, entries: tuple[TensorEntry, ...]) -> tuple[Weight, ...]:
    """Return the weights of a model after checking that each can be read and has its shape."""
    for entry in entries:
        stored = container.tensors[entry.source]
        if isinstance(stored, StoredTensor) and block_size(stored.encoding) is None:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name} is stored as {stored.encoding}, which cannot be read as weights"
            )
        if stored.shape != entry.shape:
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, expected {list(entry.shape)}"
            )
    return tuple(Weight(entry, container.tensors[entry.source]) for entry in entries)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN_NAMES])}{more}"
