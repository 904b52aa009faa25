"""Linear layers [N4]: exact integer dot products of a group, combined in one order of float32 steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import WEIGHT_GROUP
from muser_wire.reference.quantise import Quantised, power_of_two, quantise


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A matrix in canonical form: row n, column g * group + j is q[n, g, j] * s[n, g] (+ m[n, g]).

    `q` is int8 `[rows, groups, group]` with groups of 32 or 16, `s` and `m` float32 `[rows, groups]`; `m` is None
    where the encoding has no offset.
    """

    q: npt.NDArray[np.int8]
    s: npt.NDArray[np.float32]
    m: npt.NDArray[np.float32] | None

    @property
    def rows(self) -> int:
        """How many outputs it has."""
        return int(self.q.shape[0])

    @property
    def group(self) -> int:
        """Columns of a group."""
        return int(self.q.shape[2])

    @property
    def columns(self) -> int:
        """How many inputs it has."""
        return int(self.q.shape[1] * self.q.shape[2])

    def values(self) -> npt.NDArray[np.float32]:
        """Return the matrix in float32, `[rows, columns]`: q * s rounded, then + m rounded."""
        values = self.q.astype(np.float32) * self.s[:, :, None]
        if self.m is not None:
            values = values + self.m[:, :, None]
        return values.reshape(self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class LinearArrays:
    """An `IntegerWeight` in a library's arrays: `q [groups, group, rows]`, `s` and `m [groups, 1, rows]`."""

    q: Array
    s: Array
    m: Array | None


def linear_arrays(ar: Arithmetic, weight: IntegerWeight) -> LinearArrays:
    """Return a matrix as `linear` takes it."""
    q = np.ascontiguousarray(weight.q.transpose(1, 2, 0)).astype(np.float32)
    s, m = (None if part is None else np.ascontiguousarray(part.T)[:, None, :] for part in (weight.s, weight.m))
    return LinearArrays(ar.array(q), ar.array(s), None if m is None else ar.array(m))  # type: ignore[arg-type]


def quantised_input(ar: Arithmetic, x: Array) -> Quantised:
    """Return activations `[T, columns]` as every linear layer takes them."""
    return quantise(ar, x, WEIGHT_GROUP)


def linear(ar: Arithmetic, x: Quantised, weight: LinearArrays) -> Array:
    """Return the product `[T, rows]`.

    For each output a = +0, then a = a + t for its groups ascending. Of a group, D is the sum of x * q, exact, times
    the group's power of two, exact; t = s * D. With an offset t = t + m * S, where S is the sum of x times the power
    of two, exact.
    """
    groups, group, rows = weight.q.shape
    tokens = x.values.shape[0]
    values = ar.reshape(x.values, (tokens, groups, group))
    scales = power_of_two(ar, x.exponents)
    a = ar.zeros((tokens, rows))
    for g in range(groups):
        scale = scales[:, g * group // WEIGHT_GROUP]
        t = weight.s[g] * (ar.integer_dot(values[:, g], weight.q[g]) * scale)
        if weight.m is not None:
            t = t + weight.m[g] * (ar.integer_sum(values[:, g]) * scale)
        a = a + t
    ar.evaluate(a)
    return a


def joined(parts: Sequence[IntegerWeight]) -> list[IntegerWeight]:
    """Return matrices in the same order, neighbours of one form, by group and offsets, as one."""
    runs: list[list[IntegerWeight]] = []
    for part in parts:
        if runs and _form(runs[-1][0]) == _form(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_stacked(run) for run in runs]


def _form(weight: IntegerWeight) -> tuple[int, bool]:
    return weight.group, weight.m is None


def _stacked(run: list[IntegerWeight]) -> IntegerWeight:
    if len(run) == 1:
        return run[0]
    offsets = [part.m for part in run if part.m is not None]
    return IntegerWeight(
        np.concatenate([part.q for part in run]),
        np.concatenate([part.s for part in run]),
        np.concatenate(offsets) if offsets else None,
    )
