"""Attention over anchored blocks of keys [N8], for one query or a chunk of them.

All blocks are computed at once and combined last, relative to the largest maximum. Rows and keys of a chunk are taken
in spans that stay in a CPU's cache; a span is whole key blocks, so where it is cut changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from muser_decode.reference.planes import PlaneShape, Seen
from muser_decode.reference.sums import ordered_sum
from muser_decode.reference.vectors import MANTISSA_BITS, Constant, Exp2, Quantiser, whole
from muser_wire.model.spec import ModelSpec
from muser_wire.reference.attention import score_scale
from muser_wire.reference.constants import (
    DENOMINATOR_BITS,
    EXP2_LIMIT,
    HIDDEN_SCORE,
    INTEGER_BITS,
    KEY_BLOCK,
    RESCALE_LIMIT,
    SMALLEST_PRODUCT_EXPONENT,
)

SPAN_ROWS = 32
"""Query rows of a head that are computed at a time. It divides a key block, so each row sees one of its last block."""

SPAN_KEYS = 512
"""Keys that such rows attend to at a time."""

SHOWN = 3.0e38
"""Leaves a score as it is where the smaller of both is taken."""


@dataclass(frozen=True)
class KeySpan:
    """Keys [start, stop), whole blocks, counted from the first block that the chunk sees.

    `mask`, `[blocks, 1, rows, 64]`, or `[blocks, 1, 64]` of a single row, is what scores are at most; None: every row
    sees every key.
    """

    start: int
    stop: int
    mask: mx.array | None


@dataclass(frozen=True)
class RowSpan:
    """Query rows [start, stop) of a chunk, and the keys that any of them sees."""

    start: int
    stop: int
    keys: tuple[KeySpan, ...]


def spans(offset: int, tokens: int, window: int | None) -> tuple[RowSpan, ...]:
    """Return the spans of a chunk of `tokens` queries from position `offset`. Layers with one window share them."""
    width = offset + tokens if window is None else window
    base = _floor(max(0, offset - width + 1))
    result = []
    start = offset
    while start < offset + tokens:
        stop = min(offset + tokens, (start // SPAN_ROWS + 1) * SPAN_ROWS)
        first, last = _floor(max(0, start - width + 1)), -(-stop // KEY_BLOCK) * KEY_BLOCK
        # A single row's arrays are small, however many keys there are.
        step = SPAN_KEYS if tokens > 1 else last - first
        keys = (_key_span((start, stop), (at, min(last, at + step)), width, base) for at in range(first, last, step))
        result.append(RowSpan(start - offset, stop - offset, tuple(keys)))
        start = stop
    return tuple(result)


def _key_span(rows: tuple[int, int], keys: tuple[int, int], width: int, base: int) -> KeySpan:
    """Return the span of keys [keys[0], keys[1]) for queries at [rows[0], rows[1]), all absolute positions."""
    start, stop = keys
    if stop - 1 <= rows[0] and rows[1] - 1 - start < width:
        return KeySpan(start - base, stop - base, None)
    distance = mx.arange(*rows)[:, None] - mx.arange(start, stop)[None]
    visible = (distance >= 0) & (distance < width)
    mask = mx.where(visible, SHOWN, HIDDEN_SCORE)
    if rows[1] - rows[0] == 1:
        return KeySpan(start - base, stop - base, mask.reshape(-1, 1, KEY_BLOCK))
    mask = mask.reshape(rows[1] - rows[0], -1, 1, KEY_BLOCK).transpose(1, 2, 0, 3)
    return KeySpan(start - base, stop - base, mask)


class _Blocks(NamedTuple):
    """What blocks of keys come to, in units of 2 ** -15.

    `tops` `[kv_heads, blocks, rows, 1]` are whole numbers above the scores; `mixed` `[kv_heads, blocks, rows,
    head_dim + 1]` are weighted values, and the sum of the weights last.
    """

    tops: mx.array
    mixed: mx.array


class Attention:
    """Attention of one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shape = PlaneShape(spec.kv_heads, spec.head_dim)
        self._repeats = spec.heads // spec.kv_heads
        self._weights = Quantiser(INTEGER_BITS, SMALLEST_PRODUCT_EXPONENT + DENOMINATOR_BITS)
        self._exp2 = Exp2(DENOMINATOR_BITS)
        self._scale, self._one = Constant(score_scale(spec.attention_scale)), Constant(1.0)
        self._lowest, self._too_far = Constant(-EXP2_LIMIT), Constant(RESCALE_LIMIT - 1)
        self._from_too_far, self._shift = whole(int(1 - RESCALE_LIMIT)), whole(MANTISSA_BITS)

    def __call__(self, q: mx.array, seen: Seen, rows: tuple[RowSpan, ...]) -> mx.array:
        """Return `[tokens, heads * head_dim]` of quantised queries `[heads, groups, tokens, group]`.

        `seen` are the blocks of keys from the first that the first query sees.
        """
        outputs = [self._rows(q if len(rows) == 1 else q[:, :, span.start : span.stop], seen, span) for span in rows]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _rows(self, q: mx.array, seen: Seen, span: RowSpan) -> mx.array:
        heads, groups, tokens, group = q.shape
        if groups == 1:
            q = q.reshape(-1, 1, self._repeats * tokens, group)
        else:
            q = q.reshape(-1, self._repeats, groups, tokens, group).swapaxes(1, 2)
            q = q.reshape(-1, groups, 1, self._repeats * tokens, group)
        parts = [self._blocks(q, seen.part(keys.start, keys.stop), keys.mask, tokens) for keys in span.keys]
        out = self._combined(parts)
        if tokens == 1:
            return out.reshape(1, -1)
        return out.reshape(heads, tokens, -1).swapaxes(0, 1).reshape(tokens, -1)

    def _combined(self, parts: list[_Blocks]) -> mx.array:
        """Return the values `[kv_heads, 1, rows, head_dim]` of all blocks together."""
        tops = parts[0].tops if len(parts) == 1 else mx.concatenate([part.tops for part in parts], axis=1)
        mixed = parts[0].mixed if len(parts) == 1 else mx.concatenate([part.mixed for part in parts], axis=1)
        behind = tops - mx.max(tops, axis=1, keepdims=True)
        # Counted from one power below the last that counts, that one has exponent bits 0 and is 0. The others are too
        # small by one factor, which numerators and denominators share.
        steps = mx.maximum(behind, self._too_far.like(behind)).astype(mx.int32)
        bits = mx.left_shift(steps + self._from_too_far.like(steps), self._shift.like(steps))
        total = ordered_sum(mixed * mx.view(bits, mx.float32), 1)
        denominators = total[..., -1:]
        return total[..., :-1] * (self._one.like(denominators) / denominators)

    def _blocks(self, q: mx.array, seen: Seen, mask: mx.array | None, tokens: int) -> _Blocks:
        """Return the blocks of queries `[kv_heads, 1, rows, dim]`; in groups: `[kv_heads, groups, 1, rows, group]`."""
        kv_heads, blocks = self._shape.kv_heads, seen.powers.shape[1] // KEY_BLOCK
        scores = self._scores(q, seen.keys, (tokens, blocks), mask)
        tops = mx.floor(mx.max(scores, axis=-1, keepdims=True))
        tops = tops + self._one.like(tops)
        below = scores - tops
        p = self._exp2(mx.maximum(below, self._lowest.like(below)))
        shares = mx.sum(mx.round(p), axis=-1, keepdims=True)
        weighted = p * seen.powers.reshape(kv_heads, blocks, 1, KEY_BLOCK)
        scales = self._weights.scales_of_largest(mx.max(weighted, axis=-1, keepdims=True))
        integers = mx.expand_dims(mx.round(weighted * scales.up), 1)
        values = seen.values.reshape(kv_heads, 2, blocks, KEY_BLOCK, -1)
        mixed = mx.sum(integers @ values, axis=1) * scales.down
        return _Blocks(tops, mx.concatenate([mixed, shares], axis=-1))

    def _scores(self, q: mx.array, keys: mx.array, shape: tuple[int, int], mask: mx.array | None) -> mx.array:
        """Return scaled scores `[kv_heads, blocks, rows, 64]`: both parts' products are exact, their sum is rounded."""
        (tokens, blocks), groups = shape, self._shape.groups
        if groups == 1:
            total = mx.sum(q @ keys.swapaxes(2, 3), axis=1, keepdims=True)
        else:
            keys = keys.reshape(keys.shape[0], groups, 2, *keys.shape[2:])
            total = ordered_sum(mx.sum(q @ keys.swapaxes(3, 4), axis=2), 1)
        scores = total * self._scale.like(total)
        if tokens == 1:
            scores = scores.reshape(-1, self._repeats, blocks, KEY_BLOCK).swapaxes(1, 2)
            return mx.contiguous(scores) if mask is None else mx.minimum(scores, mask)
        scores = scores.reshape(-1, self._repeats, tokens, blocks, KEY_BLOCK).transpose(0, 3, 1, 2, 4)
        scores = mx.contiguous(scores) if mask is None else mx.minimum(scores, mask)
        return scores.reshape(scores.shape[0], blocks, -1, KEY_BLOCK)


def _floor(position: int) -> int:
    return position // KEY_BLOCK * KEY_BLOCK
