"""Causal attention over a cache, for one token or a chunk of them, and the rotary positions before it.

Heads share keys and values in groups: query head h reads KV head h // (heads / kv_heads). On a GPU both
are one kernel of mlx. Its CPU versions are long chains of small operations, so there the same formulas
are written here with fewer, and with powers of two: on Linux `mx.power` takes 4 ns an element, `mx.exp`
and `mx.softmax` 16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from muser_decode.numerics import on_gpu
from muser_wire.model.spec import RopeSpec

LOG2_E = math.log2(math.e)

BLOCK_ROWS = 128
"""Query rows of a block on the CPU: bounds the score matrix, and skips keys that lie after the block."""


class RopeKernel:
    """Rotary positions by mlx's kernel. Angles are f32 products: 5e-4 off at position 8,000."""

    def __init__(self, spec: RopeSpec) -> None:
        self._dims = spec.rotary_dim
        self._periods = mx.array((1.0 / _frequencies(spec)).astype(np.float32))

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Return `x` `[heads, tokens, head_dim]`, whose first token is at position `offset`, rotated."""
        y = mx.fast.rope(
            x[None], self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )
        return y.squeeze(0)


class RopeTable:
    """Rotary positions by tables computed in float64, rounded to float32: exact to rounding at any position."""

    def __init__(self, spec: RopeSpec, positions: int) -> None:
        angles = np.outer(np.arange(positions), _frequencies(spec))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._same = mx.array(np.concatenate([cos, cos], axis=1))
        self._crossed = mx.array(np.concatenate([-sin, sin], axis=1))
        self._half = spec.rotary_dim // 2

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Return `x` `[heads, tokens, head_dim]`, whose first token is at position `offset`, rotated."""
        rows = slice(offset, offset + x.shape[1])
        crossed = mx.concatenate([x[..., self._half :], x[..., : self._half]], axis=-1)
        return (x * self._same[rows] + crossed * self._crossed[rows]).astype(x.dtype)


Rope = RopeKernel | RopeTable


def _frequencies(spec: RopeSpec) -> np.ndarray:
    """Return the angle per position of each pair, float64 `[rotary_dim / 2]`."""
    return spec.theta ** (-np.arange(0, spec.rotary_dim, 2, dtype=np.float64) / spec.rotary_dim)


def rope_for(spec: RopeSpec, positions: int) -> Rope:
    """Return this device's fast version, good for positions below `positions`."""
    return RopeKernel(spec) if on_gpu() else RopeTable(spec, positions)


@dataclass(frozen=True)
class QueryBlock:
    """Query rows [start, stop) of a chunk, how many keys the last of them sees, and what the others do not."""

    start: int
    stop: int
    keys: int
    mask: mx.array


def query_blocks(offset: int, tokens: int) -> tuple[QueryBlock, ...]:
    """Return the blocks of a chunk whose first token is at position `offset`; all layers share them."""
    blocks = []
    for start in range(0, tokens, BLOCK_ROWS):
        stop = min(tokens, start + BLOCK_ROWS)
        last_seen = mx.arange(offset + start, offset + stop)[:, None]
        mask = mx.where(mx.arange(offset + stop)[None] <= last_seen, 0.0, -mx.inf)
        blocks.append(QueryBlock(start, stop, offset + stop, mask))
    return tuple(blocks)


def attend_kernel(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Return attention `[tokens, heads * dim]` by mlx, of q `[heads, tokens, dim]`, k, v `[kv_heads, keys, dim]`.

    The last query row is at the last key's position; earlier rows see correspondingly fewer keys.
    """
    mask = "causal" if q.shape[1] > 1 else None
    out = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask=mask)
    return out.squeeze(0).transpose(1, 0, 2).reshape(q.shape[1], -1)


def attend_one(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Return attention of a single query row, as `attend_kernel` does; a group's heads are rows of one product."""
    kv_heads, _, dim = k.shape
    scores = _log2_scores(q).reshape(kv_heads, -1, dim) @ k.swapaxes(1, 2)
    return _weighted(scores, v).reshape(1, -1)


def attend_blocks(q: mx.array, k: mx.array, v: mx.array, blocks: Sequence[QueryBlock]) -> mx.array:
    """Return attention of a chunk, as `attend_kernel` does, block by block of query rows."""
    kv_heads, _, dim = k.shape
    group = q.shape[0] // kv_heads
    q = _log2_scores(q)
    outputs = []
    for block in blocks:
        rows = block.stop - block.start
        folded = q[:, block.start : block.stop].reshape(kv_heads, group * rows, dim)
        scores = folded @ k[:, : block.keys].swapaxes(1, 2)
        masked = (scores.reshape(kv_heads, group, rows, -1) + block.mask).reshape(scores.shape)
        out = _weighted(masked, v[:, : block.keys])
        outputs.append(out.reshape(kv_heads * group, rows, dim).transpose(1, 0, 2).reshape(rows, -1))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _log2_scores(q: mx.array) -> mx.array:
    """Return queries whose products with keys are scores in powers of two."""
    return q * (q.shape[-1] ** -0.5 * LOG2_E)


def _weighted(scores: mx.array, v: mx.array) -> mx.array:
    """Return softmax(scores * ln 2) @ v. The division by the weights' sum comes last, where it has least to divide."""
    scores = scores.astype(mx.float32)
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.sum(weights, axis=-1, keepdims=True)
    mixed: mx.array = weights.astype(v.dtype) @ v
    return (mixed / total).astype(v.dtype)
