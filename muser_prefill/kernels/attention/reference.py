"""The reference: attention as its definition, in float32."""

from __future__ import annotations

import torch


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """Return softmax(q k^T) v over the visible positions; scores, softmax and sums in f32, rounded once at the end.

    Contract and shapes: `muser_prefill.kernels.attention`. Memory is heads * T * (start + T) floats.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.float().transpose(0, 1)
    keys, values = (x.float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    scores = queries @ keys.transpose(1, 2)
    scores = scores.masked_fill(~visible(len(q), start, window, q.device), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)


def visible(tokens: int, start: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return booleans `[tokens, start + tokens]`: which positions each query sees."""
    positions = torch.arange(start + tokens, device=device)
    distance = positions[start:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
