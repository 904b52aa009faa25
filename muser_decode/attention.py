"""Causal attention over a cache, for one token or a chunk of them, and the rotary positions before it.

A layer with a window sees only the last positions: its keys begin at the first that the first query sees.
Heads share keys and values in groups: query head h reads KV head h // (heads / kv_heads). On a GPU both
are one kernel of mlx. Its CPU versions are long chains of small operations, so there the same formulas
are written here with fewer, and with powers of two: on Linux `mx.power` takes 4 ns an element, `mx.exp`
and `mx.softmax` 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from muser_decode.numerics import on_gpu
from muser_decode.pointwise import LOG2_E
from muser_wire.model.spec import RopeSpec

BLOCK_ROWS = 128
"""Query rows of a block on the CPU: bounds the score matrix, and skips keys that no row of the block sees."""

KERNEL_ROWS = 1024
"""Query rows of a block of a sliding layer on a GPU: enough to fill it, few enough to skip keys outside the window."""


class RopeKernel:
    """Rotary positions by mlx's kernel. Angles are f32 products: 5e-4 off at position 8,000."""

    def __init__(self, spec: RopeSpec) -> None:
        self._dims = spec.rotary_dim
        self._periods = mx.array((1.0 / np.array(spec.inverse_frequencies())).astype(np.float32))

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Return `x` `[heads, tokens, head_dim]`, whose first token is at position `offset`, rotated."""
        return self._turned(x[None], offset).squeeze(0)

    def each(self, x: mx.array, positions: mx.array) -> mx.array:
        """Return `x` `[heads, rows, head_dim]`, each row rotated to a position of its own."""
        return self._turned(x.transpose(1, 0, 2)[:, :, None], positions).squeeze(2).transpose(1, 0, 2)

    def _turned(self, x: mx.array, offset: int | mx.array) -> mx.array:
        return mx.fast.rope(x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


class RopeTable:
    """Rotary positions by tables computed in float64, rounded to float32: exact to rounding at any position."""

    def __init__(self, spec: RopeSpec, positions: int) -> None:
        angles = np.outer(np.arange(positions), spec.inverse_frequencies())
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._same = mx.array(np.concatenate([cos, cos], axis=1))
        self._crossed = mx.array(np.concatenate([-sin, sin], axis=1))
        self._dims = spec.rotary_dim

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Return `x` `[heads, tokens, head_dim]`, whose first token is at position `offset`, rotated."""
        return self._turned(x, slice(offset, offset + x.shape[1]))

    def each(self, x: mx.array, positions: mx.array) -> mx.array:
        """Return `x` `[heads, rows, head_dim]`, each row rotated to a position of its own."""
        return self._turned(x, positions)

    def _turned(self, x: mx.array, rows: slice | mx.array) -> mx.array:
        if x.shape[-1] == self._dims:
            return self._rotated(x, rows)
        return mx.concatenate([self._rotated(x[..., : self._dims], rows), x[..., self._dims :]], axis=-1)

    def _rotated(self, x: mx.array, rows: slice | mx.array) -> mx.array:
        half = self._dims // 2
        crossed = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return (x * self._same[rows] + crossed * self._crossed[rows]).astype(x.dtype)


Rope = RopeKernel | RopeTable


def rope_for(spec: RopeSpec, positions: int) -> Rope:
    """Return this device's fast version, good for positions below `positions`."""
    return RopeKernel(spec) if on_gpu() else RopeTable(spec, positions)


@dataclass(frozen=True)
class QueryBlock:
    """Query rows [start, stop) of a chunk, the keys [first, last) that they see, and which of them each row sees.

    `mask`, `[rows, keys]`, is true where a row sees a key, or is what to add to scores.
    """

    start: int
    stop: int
    first: int
    last: int
    mask: mx.array


def query_blocks(offset: int, tokens: int, window: int | None, rows: int) -> tuple[QueryBlock, ...]:
    """Return the blocks, of `rows` query rows each, of a chunk whose first token is at position `offset`.

    Keys count from the first position that the first query sees. Layers with the same window share the blocks.
    """
    width = offset + tokens if window is None else window
    base = max(0, offset - width + 1)
    blocks = []
    for start in range(0, tokens, rows):
        stop = min(tokens, start + rows)
        first, last = max(0, offset + start - width + 1), offset + stop
        distance = mx.arange(offset + start, last)[:, None] - mx.arange(first, last)[None]
        visible = (distance >= 0) & (distance < width)
        blocks.append(QueryBlock(start, stop, first - base, last - base, visible))
    return tuple(blocks)


Attend = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Attention `[tokens, heads * dim]` of q `[heads, tokens, dim]` over k, v `[kv_heads, keys, dim]`.

The last query is at the last key's position. The first key is the first that the first query sees.
"""


def attention_of_one(scale: float) -> Attend:
    """Return this device's attention of a single query, which sees every key that there is."""
    if on_gpu():
        return lambda q, k, v: attend_kernel(q, k, v, scale)
    return lambda q, k, v: attend_one(q, k, v, scale)


def attention_of_chunk(offset: int, tokens: int, window: int | None, scale: float) -> Attend:
    """Return this device's attention of a chunk whose first token is at position `offset`."""
    if not on_gpu():
        blocks = query_blocks(offset, tokens, window, BLOCK_ROWS)
        added = [replace(block, mask=mx.where(block.mask, 0.0, -mx.inf)) for block in blocks]
        return lambda q, k, v: attend_blocks(q, k, v, scale, added)
    if window is None or offset + tokens <= window:
        return lambda q, k, v: attend_kernel(q, k, v, scale)
    blocks = query_blocks(offset, tokens, window, KERNEL_ROWS)
    return lambda q, k, v: attend_kernel_blocks(q, k, v, scale, blocks)


def attend_kernel(q: mx.array, k: mx.array, v: mx.array, scale: float, visible: mx.array | None = None) -> mx.array:
    """Return attention by mlx. Without `visible`, `[tokens, keys]`, each query sees the keys up to its own position."""
    mask = visible if visible is not None else "causal" if q.shape[1] > 1 else None
    out = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale, mask=mask)
    return out.squeeze(0).transpose(1, 0, 2).reshape(q.shape[1], -1)


def attend_kernel_blocks(q: mx.array, k: mx.array, v: mx.array, scale: float, blocks: Sequence[QueryBlock]) -> mx.array:
    """Return attention of a chunk by mlx, block by block of query rows."""
    outputs = []
    for block in blocks:
        rows, keys = slice(block.start, block.stop), slice(block.first, block.last)
        outputs.append(attend_kernel(q[:, rows], k[:, keys], v[:, keys], scale, block.mask))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def attend_one(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Return attention of a single query; a group's heads are rows of one product."""
    kv_heads, _, dim = k.shape
    scores = _log2_scores(q, scale).reshape(kv_heads, -1, dim) @ k.swapaxes(1, 2)
    return _weighted(scores, v).reshape(1, -1)


def attend_blocks(q: mx.array, k: mx.array, v: mx.array, scale: float, blocks: Sequence[QueryBlock]) -> mx.array:
    """Return attention of a chunk, block by block of query rows, whose masks are added to their scores."""
    kv_heads, _, dim = k.shape
    group = q.shape[0] // kv_heads
    q = _log2_scores(q, scale)
    outputs = []
    for block in blocks:
        rows = block.stop - block.start
        folded = q[:, block.start : block.stop].reshape(kv_heads, group * rows, dim)
        scores = folded @ k[:, block.first : block.last].swapaxes(1, 2)
        masked = (scores.reshape(kv_heads, group, rows, -1) + block.mask).reshape(scores.shape)
        out = _weighted(masked, v[:, block.first : block.last])
        outputs.append(out.reshape(kv_heads * group, rows, dim).transpose(1, 0, 2).reshape(rows, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _log2_scores(q: mx.array, scale: float) -> mx.array:
    """Return queries whose products with keys are scores in powers of two."""
    return q * (scale * LOG2_E)


def _weighted(scores: mx.array, v: mx.array) -> mx.array:
    """Return softmax(scores * ln 2) @ v. The division by the weights' sum comes last, where it has least to divide."""
    scores = scores.astype(mx.float32)
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.sum(weights, axis=-1, keepdims=True)
    mixed: mx.array = weights.astype(v.dtype) @ v
    return (mixed / total).astype(v.dtype)
