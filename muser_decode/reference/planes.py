"""Keys and values as they travel [N7], and the integers that attention reads, in MLX operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from muser_decode.reference.vectors import Constant, Quantiser
from muser_wire.reference.constants import INTEGER_BITS, LIMB_BITS, PLANE_LARGEST, PLANE_SMALLEST, SMALLEST_EXPONENT
from muser_wire.reference.planes import head_group


class Seen(NamedTuple):
    """What attention reads of some tokens; they are the last axis but one of every array.

    - `keys`: high and low part of each group's numbers, `[kv_heads, groups * 2, tokens, group]`.
    - `values`: high and low parts of their integers, `[kv_heads, 2, tokens, head_dim]`.
    - `powers`: the values' powers of two, `[kv_heads, tokens, 1]`.

    The parts add up to the number or the integer. A high part is a multiple of 64 times its power of two.
    """

    keys: mx.array
    values: mx.array
    powers: mx.array

    def part(self, start: int, stop: int) -> Seen:
        """Return the tokens [start, stop), counted from the first that is here."""
        if start == 0 and stop == self.powers.shape[1]:
            return self
        keys, values, powers = self
        return Seen(keys[:, :, start:stop], values[:, :, start:stop], powers[:, start:stop])


class Rows(NamedTuple):
    """Some tokens of one layer: keys above values as they travel, float16 `[2 * kv_heads, tokens, head_dim]`, and
    what attention reads of them.
    """

    planes: mx.array
    seen: Seen

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.planes.shape[1])

    def arrays(self) -> tuple[mx.array, ...]:
        """Return all, planes first."""
        return (self.planes, *self.seen)

    def part(self, start: int, stop: int) -> Rows:
        """Return the tokens [start, stop), counted from the first that is here."""
        return Rows(self.planes[:, start:stop], self.seen.part(start, stop))


@dataclass(frozen=True)
class PlaneShape:
    """What a model's rows look like."""

    kv_heads: int
    head_dim: int

    @cached_property
    def group(self) -> int:
        """Components of a key that share one exponent."""
        return head_group(self.head_dim)

    @cached_property
    def groups(self) -> int:
        """How many such groups a head has."""
        return self.head_dim // self.group

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token: planes in float16, two parts each of keys and values in float32, powers."""
        return self.kv_heads * (self.head_dim * (2 * 2 + 2 * 4 + 2 * 4) + 4)

    def empty(self, tokens: int) -> list[mx.array]:
        """Return the arrays of `Rows`, of zeros."""
        heads, dim = self.kv_heads, self.head_dim
        return [
            mx.zeros((2 * heads, tokens, dim), mx.float16),
            mx.zeros((heads, self.groups * 2, tokens, self.group)),
            mx.zeros((heads, 2, tokens, dim)),
            mx.zeros((heads, tokens, 1)),
        ]


class PlaneRounding:
    """Makes planes of float32 keys and values."""

    def __init__(self) -> None:
        self._smallest, self._zero = Constant(PLANE_SMALLEST), Constant(0.0)
        self._lowest, self._highest = Constant(-PLANE_LARGEST), Constant(PLANE_LARGEST)

    def __call__(self, x: mx.array) -> mx.array:
        """Return float16: no subnormals, no negative zero, no infinity."""
        x = mx.where(mx.abs(x) < self._smallest.like(x), self._zero.like(x), x)
        return mx.minimum(mx.maximum(x, self._lowest.like(x)), self._highest.like(x)).astype(mx.float16)


class Derivation:
    """Derives the integers of rows from their planes, each token by itself."""

    def __init__(self, shape: PlaneShape) -> None:
        self._shape = shape
        self._quantiser = Quantiser(INTEGER_BITS, SMALLEST_EXPONENT)
        self._limb, self._from_limb = Constant(2.0**-LIMB_BITS), Constant(2.0**LIMB_BITS)

    def rows(self, planes: mx.array) -> Rows:
        """Return rows with these planes, float16 `[2 * kv_heads, tokens, head_dim]`."""
        x = planes.astype(mx.float32)
        if self._shape.groups == 1:
            scales = self._quantiser.scales(x)
            return Rows(planes, self._whole_heads(mx.round(x * scales.up), scales.down))
        heads = self._shape.kv_heads
        keys = self._grouped(x[:heads])
        scales = self._quantiser.scales(keys)
        parts = self._parts(mx.round(keys * scales.up), 2) * mx.expand_dims(scales.down, 2)
        values = self._quantiser.scales(x[heads:])
        wholes = self._parts(mx.round(x[heads:] * values.up), 1)
        return Rows(planes, Seen(parts.reshape(heads, -1, *parts.shape[3:]), wholes, values.down))

    def rows_and_queries(self, planes: mx.array, q: mx.array) -> tuple[Rows, mx.array]:
        """Return rows with these planes, and queries `[heads, tokens, head_dim]` as integers times powers of two.

        These are `[heads, groups, tokens, group]`. Where a head is one group, one pass does both.
        """
        if self._shape.groups > 1:
            grouped = self._grouped(q)
            scales = self._quantiser.scales(grouped)
            return self.rows(planes), mx.round(grouped * scales.up) * scales.down
        x, heads = mx.concatenate([planes.astype(mx.float32), q]), 2 * self._shape.kv_heads
        scales = self._quantiser.scales(x)
        integers = mx.round(x * scales.up)
        rows = Rows(planes, self._whole_heads(integers[:heads], scales.down[:heads]))
        return rows, mx.expand_dims(integers[heads:] * scales.down[heads:], 1)

    def _whole_heads(self, integers: mx.array, down: mx.array) -> Seen:
        """Return keys above values, `[2 * kv_heads, tokens, head_dim]` integers, where a head is one group."""
        heads = self._shape.kv_heads
        parts = self._parts(integers, 1)
        return Seen(parts[:heads] * mx.expand_dims(down[:heads], 1), parts[heads:], down[heads:])

    def _grouped(self, x: mx.array) -> mx.array:
        """Return heads `[heads, tokens, head_dim]` as `[heads, groups, tokens, group]`."""
        return x.reshape(*x.shape[:2], self._shape.groups, self._shape.group).swapaxes(1, 2)

    def _parts(self, integers: mx.array, axis: int) -> mx.array:
        """Return the high and the low parts of integers, along a new axis."""
        high = mx.round(integers * self._limb.like(integers)) * self._from_limb.like(integers)
        return mx.stack([high, integers - high], axis)
