"""A model's weights in the reference lane's canonical form [N10], and the digest over it.

Two files with equal canonical forms give equal bytes in this lane, whatever container holds them. Weights that are not
integers with scales have no such form: they are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from muser_wire.errors import CheckpointError
from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint, Weight, rotate_half_rows
from muser_wire.model.container import StoredTensor
from muser_wire.model.spec import ModelSpec
from muser_wire.reference.blocks import DECODERS
from muser_wire.reference.constants import WEIGHT_GROUP
from muser_wire.reference.linear import IntegerWeight

LABEL = b"muser canonical weights 1"
SMALLEST_EPS = 2.0**-40
"""A norm's eps keeps sums of squares away from subnormals, of which nothing may depend."""
LARGEST_GATHER = 1 << 24
HINT = "`muser model quantize --to q8_0 SOURCE OUT.gguf` writes a file for this lane"


class Weights(Protocol):
    """A model's weights as the lane's decoders read them, whatever they come from."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    def names(self) -> tuple[str, ...]:
        """Return the tensor names in canonical order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape: `linear` gives one with two axes, `vector` one with one."""

    def linear(self, name: str, start: int = 0, stop: int | None = None) -> IntegerWeight:
        """Return rows [start, stop) of a matrix."""

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Return a norm's multipliers."""

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the embedding rows of tokens, before scale and norm."""


class CanonicalWeights:
    """The weights of an opened checkpoint, converted tensor by tensor when asked for.

    Raises:
        CheckpointError: a matrix is not stored as integers with scales, or the model has a size that the lane lacks.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self._checkpoint = checkpoint
        check_spec(checkpoint)
        for name in checkpoint.names():
            weight = checkpoint.weight(name)
            if len(weight.shape) == 2:
                _stored(checkpoint, weight)

    def names(self) -> tuple[str, ...]:
        """Return the tensor names in canonical order."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape: `linear` gives one with two axes, `vector` one with one."""
        return self._checkpoint.weight(name).shape

    def linear(self, name: str, start: int = 0, stop: int | None = None) -> IntegerWeight:
        """Return rows [start, stop) of a matrix."""
        weight = self._checkpoint.weight(name)
        rows = np.arange(start, weight.shape[0] if stop is None else stop)
        return self._rows(name, rows)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Return a norm's multipliers in float32."""
        values = self._checkpoint.weight(name).f32()
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self._checkpoint.path}: tensor {name} has a number that is not finite")
        return values

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the embedding rows of tokens: q * s rounded, then + m rounded."""
        return self._rows("embed.weight", np.asarray(ids, np.int64)).values()

    def digest(self) -> Digest:
        """Return SHA-256 over every tensor's name, shape, integers, scales and offsets: the lane's weights digest."""
        h = hashlib.sha256()

        def add(part: bytes) -> None:
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)

        add(LABEL)
        for name in self.names():
            add(name.encode())
            if len(self.shape(name)) == 2:
                _add_matrix(self, name, h)
            else:
                add(self.vector(name).astype("<f4").tobytes())
        return Digest(h.digest())

    def _rows(self, name: str, rows: npt.NDArray[np.int64]) -> IntegerWeight:
        weight = self._checkpoint.weight(name)
        stored = _stored(self._checkpoint, weight)
        heads = weight.entry.interleaved_heads
        if heads:
            rows = rotate_half_rows(heads, weight.shape[0] // heads)[rows]
        count, nbytes, decode = DECODERS[stored.encoding]
        blocks = stored.data.reshape(weight.shape[0], weight.shape[1] // count, nbytes)[rows]
        with np.errstate(invalid="ignore"):
            matrix = decode(blocks)
        if not (np.isfinite(matrix.s).all() and (matrix.m is None or np.isfinite(matrix.m).all())):
            raise CheckpointError(f"{stored.path}: tensor {stored.name} has a scale that is not finite")
        if matrix.m is not None:
            # One zero only: -0 and +0 mean the same weight.
            matrix = replace(matrix, m=matrix.m + np.float32(0))
        return matrix


def _add_matrix(weights: CanonicalWeights, name: str, h: hashlib._Hash) -> None:
    """Hash a matrix some rows at a time: shape first, then for each slice integers, scales, offsets."""
    rows, columns = weights.shape(name)
    group = weights.linear(name, 0, 1)
    for number in (rows, columns, group.group, int(group.m is not None)):
        h.update(number.to_bytes(8, "little"))
    step = max(1, LARGEST_GATHER // columns)
    for start in range(0, rows, step):
        part = weights.linear(name, start, min(rows, start + step))
        h.update(part.q.tobytes())
        h.update(part.s.astype("<f4").tobytes())
        if part.m is not None:
            h.update(part.m.astype("<f4").tobytes())


def _stored(checkpoint: Checkpoint, weight: Weight) -> StoredTensor:
    """Return a matrix's bytes after checking that they are integers with scales."""
    stored = weight.stored
    if not isinstance(stored, StoredTensor) or stored.encoding not in DECODERS:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {weight.name} is stored as {weight.encoding}; the reference lane computes with "
            f"integers and takes {', '.join(DECODERS)}: {HINT}"
        )
    return stored


def check_spec(checkpoint: Checkpoint) -> None:
    """Check that a model's sizes fit the lane's groups.

    Raises:
        CheckpointError: naming the size that does not.
    """
    spec = checkpoint.spec
    sizes = {
        "hidden_size": spec.hidden_size,
        "ffn_size": spec.ffn_size,
        "heads * head_dim": spec.heads * spec.head_dim,
    }
    for name, size in sizes.items():
        if size % WEIGHT_GROUP:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {size}, which is no multiple of {WEIGHT_GROUP}: the reference lane "
                "cannot compute this model"
            )
    of_heads = None if spec.qk_norm is None else spec.qk_norm.eps
    for name, eps in (("norm_eps", spec.norm_eps), ("post_norm_eps", spec.post_norm_eps), ("qk_norm.eps", of_heads)):
        if eps is not None and eps < SMALLEST_EPS:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {eps}: the reference lane needs at least {SMALLEST_EPS}"
            )
