"""`Attention` by Triton kernels."""

from __future__ import annotations

import torch
import triton

from muser_prefill.kernels.exact import Sight
from muser_prefill.kernels.exact.triton.attention_kernels import (
    attention_kernel,
    head_integers_kernel,
    value_integers_kernel,
)
from muser_prefill.kernels.exact.triton.launch import cdiv, launch
from muser_wire.reference.constants import KEY_BLOCK
from muser_wire.reference.planes import head_group

SMALLEST_PRODUCT = 32
"""Columns of the tensor cores' smallest int8 product."""
INTEGER_ROWS, INTEGER_WARPS = 32, 4
TILE_QUERIES, LARGE_HEAD_QUERIES, FEW_QUERIES, LARGE_HEAD = 64, 32, 16, 128
"""Queries of a program: of heads up to 128, of larger ones, and where there are few. More would not fit registers."""
WARPS, STAGES = 8, 2
"""Warps of a program, and loads under way: with three, a head of 256 would not fit GB10's 99 KiB of shared memory."""
Integers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TritonAttention:
    """Contract: `muser_prefill.kernels.exact.Attention`."""

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        """Return attention over planes, whose integers are derived here, every time."""
        count, heads, head_dim = q.shape
        base = sight.first // KEY_BLOCK * KEY_BLOCK
        slots = cdiv(sight.first - base + len(keys), KEY_BLOCK) * KEY_BLOCK
        group = head_group(head_dim)
        out = torch.empty(count, heads * head_dim, device=q.device)
        rows = _tile(count, head_dim)
        launch(
            attention_kernel,
            (cdiv(count, rows), heads),
            _head_integers(q, 0, count),
            _head_integers(keys, sight.first - base, slots),
            _value_integers(values, sight.first - base, slots),
            out,
            *(count, slots, sight.start, base, sight.first),
            sight.start + count if sight.window is None else sight.window,
            scale,
            heads // keys.shape[1],
            head_dim=head_dim,
            width=triton.next_power_of_2(head_dim),
            group=group,
            padded=max(group, SMALLEST_PRODUCT),
            rows=rows,
            warps=WARPS,
            stages=STAGES,
        )
        return out


def _tile(count: int, head_dim: int) -> int:
    if count <= FEW_QUERIES:
        return FEW_QUERIES
    return TILE_QUERIES if head_dim <= LARGE_HEAD else LARGE_HEAD_QUERIES


def _head_integers(x: torch.Tensor, empty: int, slots: int) -> Integers:
    """Return queries or keys, after `empty` slots, as the kernel reads them."""
    count, heads, head_dim = x.shape
    group = head_group(head_dim)
    high, low = (torch.empty(heads, slots, head_dim, dtype=torch.int8, device=x.device) for _ in range(2))
    to = high, low, torch.empty(heads, head_dim // group, slots, device=x.device)
    grid = cdiv(slots, INTEGER_ROWS), heads, head_dim // group
    arguments = (x, to, empty, count, slots, heads, head_dim)
    launch(head_integers_kernel, grid, *arguments, group=group, rows=INTEGER_ROWS, warps=INTEGER_WARPS)
    return to


def _value_integers(x: torch.Tensor, empty: int, slots: int) -> Integers:
    """Return values, after `empty` slots, as the kernel reads them."""
    count, heads, head_dim = x.shape
    high, low = (torch.empty(heads, head_dim, slots, dtype=torch.int8, device=x.device) for _ in range(2))
    to = high, low, torch.empty(heads, slots, device=x.device)
    sizes = {"head_dim": head_dim, "width": triton.next_power_of_2(head_dim), "rows": INTEGER_ROWS}
    arguments = (x, to, empty, count, slots, heads)
    launch(value_integers_kernel, (cdiv(slots, INTEGER_ROWS), heads), *arguments, **sizes, warps=INTEGER_WARPS)
    return to
