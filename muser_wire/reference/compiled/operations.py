"""The compiled kernels over numpy arrays: what a CPU uses.

Dot products of int16 pairs (AVX512-VNNI where the processor has it), float32 steps each rounded by itself. Matrices are
held as int8 with their scales and offsets, in panels of 32 outputs. Arrays are contiguous float32 unless said
otherwise; shapes are the caller's duty.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from muser_wire.model.spec import Activation, as_f32
from muser_wire.reference.attention import View
from muser_wire.reference.compiled.library import (
    AttentionCall,
    HeadsCall,
    IntegersCall,
    LinearCall,
    QuantisedCall,
    address,
)
from muser_wire.reference.constants import KEY_BLOCK, WEIGHT_GROUP
from muser_wire.reference.linear import IntegerWeight, joined
from muser_wire.reference.planes import head_group
from muser_wire.reference.rope import RopeTable

PANEL = 32
"""Outputs of a panel: `COLUMNS` of linear.h."""
WIDEST = 16
"""Lanes of the widest vectors: a head's values are filled up to a multiple."""

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows as integers `[T, n]` int16, the power of two of each group of 32, and the group's integer sum times it."""

    values: npt.NDArray[np.int16]
    scales: Floats
    sums: Floats


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix of one form: int8 `[panels, columns / 2, 32, 2]`, scales and offsets `[panels, groups, 32]`."""

    weights: npt.NDArray[np.int8]
    scales: Floats
    offsets: Floats | None
    rows: int
    group: int


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm over head_dim; `weight` `[head_dim]` or None."""

    weight: Floats | None
    eps: float


@dataclass(frozen=True, eq=False)
class Planes:
    """Keys and values as they travel, each `[held, kv_heads, head_dim]`."""

    keys: Halves
    values: Halves


@dataclass(frozen=True, eq=False)
class Integers:
    """Planes as integers, by blocks of 64 positions, each array `[kv_heads, blocks, ...]`: see attention.h."""

    keys: npt.NDArray[np.int16]
    values: npt.NDArray[np.int16]
    key_scales: Floats
    value_scales: Floats

    @classmethod
    def zeros(cls, kv_heads: int, head_dim: int, blocks: int) -> Integers:
        """Return room for so many blocks."""
        width, groups = -(-head_dim // WIDEST) * WIDEST, head_dim // head_group(head_dim)
        return cls(
            np.zeros((kv_heads, blocks, KEY_BLOCK * head_dim), np.int16),
            np.zeros((kv_heads, blocks, KEY_BLOCK * width), np.int16),
            np.zeros((kv_heads, blocks, KEY_BLOCK * groups), np.float32),
            np.zeros((kv_heads, blocks, KEY_BLOCK), np.float32),
        )

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return all."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @cached_property
    def call(self) -> IntegersCall:
        """The structure that the kernels read."""
        names = ("keys", "values", "key_scales", "value_scales")
        addresses = zip(names, map(address, self.arrays()), strict=True)
        return IntegersCall(**dict(addresses), count=self.keys.shape[1])


def panels(weight: IntegerWeight) -> Panels:
    """Return a matrix in panels, the last one filled with zeros.

    Offsets of groups of 16 would need sums that activations do not carry; no format has them, and joining the sums of
    two groups would change their order.
    """
    if weight.m is not None and weight.group != WEIGHT_GROUP:
        raise ValueError(f"offsets of groups of {weight.group} columns: groups have {WEIGHT_GROUP}")
    return Panels(
        weights=_by_panel(weight.q.reshape(weight.rows, -1, 2)),
        scales=_by_panel(weight.s),
        offsets=None if weight.m is None else _by_panel(weight.m),
        rows=weight.rows,
        group=weight.group,
    )


def _by_panel(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `[rows, n, ...]` as `[panels, n, 32, ...]`."""
    rows, rest = len(values), values.shape[1:]
    filled = np.zeros((-(-rows // PANEL) * PANEL, *rest), values.dtype)
    filled[:rows] = values
    return np.ascontiguousarray(filled.reshape(-1, PANEL, *rest).swapaxes(1, 2))


class Operations:
    """The kernels of a loaded library. `threads` says how many threads a call may use."""

    def __init__(self, library: ctypes.CDLL, threads: Callable[[], int]) -> None:
        self._library, self._threads = library, threads

    def matrix(self, parts: Sequence[IntegerWeight]) -> list[Panels]:
        """Return matrices, those of one form joined."""
        return [panels(part) for part in joined(parts)]

    def quantised(self, x: Floats) -> Activations:
        """Return rows `[T, n]` as activations."""
        return self._quantised(x, None, None)

    def normed(self, x: Floats, weight: Floats | None, eps: float) -> Activations:
        """Return rows as activations after RMSNorm."""
        return self._quantised(x, weight, eps)

    def _quantised(self, x: Floats, weight: Floats | None, eps: float | None) -> Activations:
        rows, columns = x.shape
        to = _activations(rows, columns)
        self._library.muser_quantise(
            address(x),
            address(weight),
            eps is not None,
            eps or 0.0,
            as_f32(1.0 / columns),
            rows,
            columns,
            _call(to),
            self._threads_for(rows),
        )
        return to

    def activated(self, gate_up: Floats, activation: Activation) -> Activations:
        """Return `[T, 2 n]`, gate and up, as activations of f(gate) * up."""
        rows, columns = len(gate_up), gate_up.shape[1] // 2
        to = _activations(rows, columns)
        gelu = activation is Activation.GELU_TANH
        self._library.muser_activate(address(gate_up), gelu, rows, columns, _call(to), self._threads_for(rows))
        return to

    def gated(self, x: Floats, gate: Floats) -> Activations:
        """Return x * sigmoid(gate) as activations; the rows of `gate` may lie further apart."""
        to = _activations(*x.shape)
        threads = self._threads_for(len(x))
        self._library.muser_gate(address(x), address(gate), _row_stride(gate), *x.shape, _call(to), threads)
        return to

    def product(self, x: Activations, matrix: Sequence[Panels], residual: Floats | None = None) -> Floats:
        """Return the products side by side, `[T, rows of all]`, added to `residual`."""
        rows, columns = x.values.shape
        outputs = sum(part.rows for part in matrix)
        result = np.empty((rows, outputs), np.float32)
        first = 0
        for part in matrix:
            call = LinearCall(
                values=address(x.values),
                scales=address(x.scales),
                sums=address(x.sums),
                weights=address(part.weights),
                weight_scales=address(part.scales),
                offsets=address(part.offsets),
                residual=None if residual is None else address(residual[:, first:]),
                to=address(result[:, first:]),
                rows=rows,
                outputs=part.rows,
                inputs=columns,
                stride=outputs,
                group=part.group,
            )
            self._library.muser_linear(ctypes.byref(call), self._threads())
            first += part.rows
        return result

    def added(self, residual: Floats, x: Floats, weight: Floats, eps: float) -> Floats:
        """Return residual + RMSNorm(x)."""
        rows, columns = x.shape
        total = np.empty(x.shape, np.float32)
        self._library.muser_add_normed(
            address(residual),
            address(x),
            address(weight),
            eps,
            as_f32(1.0 / columns),
            rows,
            columns,
            address(total),
            self._threads_for(rows),
        )
        return total

    def turned(self, x: Floats, norm: HeadNorm | None, positions: RopeTable | None) -> Floats:
        """Return heads `[T, heads, head_dim]`, whose rows may lie further apart, after their norm and positions."""
        to = np.empty(x.shape, np.float32)
        self._heads(x, norm, positions, to)
        return to

    def plane(self, x: Floats, norm: HeadNorm | None, positions: RopeTable | None) -> Halves:
        """Return the same rounded to float16, as it travels."""
        to = np.empty(x.shape, np.float16)
        self._heads(x, norm, positions, to)
        return to

    def _heads(
        self, x: Floats, norm: HeadNorm | None, positions: RopeTable | None, to: npt.NDArray[np.floating[Any]]
    ) -> None:
        rows, heads, head_dim = x.shape
        half = to.dtype == np.float16
        call = HeadsCall(
            from_=address(x),
            weight=None if norm is None else address(norm.weight),
            cos=None if positions is None else address(positions.cos),
            sin=None if positions is None else address(positions.sin),
            to=None if half else address(to),
            plane=address(to) if half else None,
            rows=rows,
            heads=heads,
            head_dim=head_dim,
            stride=_row_stride(x),
            half=0 if positions is None else positions.cos.shape[1],
            normed=norm is not None,
            eps=0.0 if norm is None else norm.eps,
            one_over_dim=as_f32(1.0 / head_dim),
        )
        self._library.muser_heads(ctypes.byref(call), self._threads_for(rows))

    def attended(self, q: Floats, seen: Planes | Integers, view: View) -> Floats:
        """Return `[T, heads * head_dim]` of queries `[T, heads, head_dim]` over what they see, in either form.

        Planes are of positions from `view.first_key` to the last query's; their integers are derived there. Integers
        begin with the block of `view.first_key`; rows that no query sees may be anything.
        """
        held = isinstance(seen, Integers)
        out = np.empty((len(q), q.shape[1] * q.shape[2]), np.float32)
        call = _attention(q.shape, seen.keys.shape[0 if held else 1], view)
        call.queries, call.to = address(q), address(out)
        if isinstance(seen, Integers):
            call.integers = ctypes.addressof(seen.call)
        else:
            call.keys, call.values = address(seen.keys), address(seen.values)
        self._library.muser_attention(ctypes.byref(call), self._threads())
        return out

    def derive(self, rows: Planes, start: int, into: Integers, origin: int) -> None:
        """Write the integers of rows at positions from `start`; the first block of `into` is that of `origin`."""
        call = _attention(rows.keys.shape, rows.keys.shape[1], View(start, start, None, 1.0))
        call.keys, call.values = address(rows.keys), address(rows.values)
        call.integers = ctypes.addressof(into.call)
        self._library.muser_derive(ctypes.byref(call), origin, self._threads_for(len(rows.keys)))

    def _threads_for(self, rows: int) -> int:
        return max(1, min(rows, self._threads()))


def _attention(shape: tuple[int, ...], kv_heads: int, view: View) -> AttentionCall:
    tokens, heads, head_dim = shape
    return AttentionCall(
        tokens=tokens,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        start=view.first_query,
        first=view.first_key,
        window=view.window or 0,
        group=head_group(head_dim),
        scale=view.scale,
    )


def _activations(rows: int, columns: int) -> Activations:
    groups = columns // WEIGHT_GROUP
    values = np.empty((rows, columns), np.int16)
    return Activations(values, np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32))


def _row_stride(x: Floats) -> int:
    """Return how many numbers lie from row to row."""
    return x.strides[0] // x.itemsize


def _call(to: Activations) -> object:
    call = QuantisedCall(values=address(to.values), scales=address(to.scales), sums=address(to.sums))
    return ctypes.byref(call)
