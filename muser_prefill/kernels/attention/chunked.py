"""Attention on a CPU: blocks of query rows against exactly the keys that they see.

A block of r queries makes one `[kv_heads, r * group, n]` matrix product with the n keys that any of them sees, a
softmax in place, and one product with the values. The query heads that share a key head are rows of the same product,
so keys are packed once for all of them. Only the last r columns need the causal mask, and only the first r the
window's: everything between is visible to every row, everything outside is not computed.

Scores and weights have the compute type, sums inside a product and inside softmax are f32. Budgets attention_f32 and
attention_bf16.
"""

from __future__ import annotations

import torch

BLOCK_ROWS = 128
"""Queries in a block: the best of 64, 128 and 256 for heads of 64 on AVX-512."""

SCORES_NBYTES = 64 << 20
"""Bound of the scores buffer, in bytes; blocks get fewer rows where the prompt is so long that they would exceed it."""


class ChunkedAttention:
    """Contract and shapes: `muser_prefill.kernels.attention`. One thread at a time: the scores buffer is kept."""

    def __init__(self, block_rows: int = BLOCK_ROWS, scores_nbytes: int = SCORES_NBYTES) -> None:
        self._block_rows = block_rows
        self._scores_nbytes = scores_nbytes
        self._buffer = torch.empty(0)
        self._upper = torch.empty(0)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None
    ) -> torch.Tensor:
        """Return softmax(q k^T) v over the visible positions."""
        tokens, heads, _ = q.shape
        stop = start + tokens
        widest = stop if window is None else min(stop, window + self._block_rows)
        rows = self._rows(heads * widest * q.element_size())
        self._prepare(heads * rows * widest, rows, q)
        keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row in range(0, tokens, rows):
            end = min(row + rows, tokens)
            first = 0 if window is None else max(0, start + row - window + 1)
            seen = slice(first, start + end)
            scores = self._scores(q[row:end], keys[:, :, seen])
            self._mask(scores, end - row, stop if window is None else first + window - start - row)
            torch.softmax(scores, -1, out=scores)
            _unfold(torch.bmm(scores, values[:, seen]), out[row:end])
        return out

    def _rows(self, row_nbytes: int) -> int:
        return max(1, min(self._block_rows, self._scores_nbytes // row_nbytes))

    def _prepare(self, elements: int, rows: int, like: torch.Tensor) -> None:
        """Have a buffer for one block's scores, and the strictly upper triangle of -inf, in the type of `like`."""
        if self._buffer.numel() < elements or self._buffer.dtype != like.dtype:
            self._buffer = like.new_empty(elements)
        if len(self._upper) < rows or self._upper.dtype != like.dtype:
            self._upper = like.new_full((rows, rows), float("-inf")).triu_(1)

    def _scores(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return `[kv_heads, r * group, n]` in the buffer; row i * group + g is query i's head g of the key head."""
        rows, heads, head_dim = q.shape
        kv_heads, _, n = keys.shape
        scores = self._buffer[: heads * rows * n].view(kv_heads, -1, n)
        folded = q.view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        return torch.bmm(folded, keys, out=scores)

    def _mask(self, scores: torch.Tensor, rows: int, unmasked: int) -> None:
        """Hide the future, in the last `rows` columns, and what left the window, in the first.

        `unmasked` counts the rows, from the first, that still see column 0.
        """
        kv_heads, _, n = scores.shape
        by_row = scores.view(kv_heads, rows, -1, n)
        by_row[..., n - rows :].add_(self._upper[:rows, None, :rows])
        if unmasked < rows:
            left = rows - unmasked + 1
            by_row[:, unmasked - 1 :, :, :rows].add_(self._upper.T[:left, None, :rows])


def _unfold(folded: torch.Tensor, out: torch.Tensor) -> None:
    """Write `[kv_heads, r * group, head_dim]` into `[r, heads, head_dim]`."""
    rows, heads, head_dim = out.shape
    kv_heads = len(folded)
    grouped = folded.view(kv_heads, rows, heads // kv_heads, head_dim)
    out.view(rows, kv_heads, -1, head_dim).copy_(grouped.transpose(0, 1))
