"""RMSNorm without its weight, which is folded into the product that follows."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x^2) + eps)` over the last axis of `[T, hidden]`: computed in f32, in the type of `x`."""
    values = x.float()
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    mean_square = length.square_().div_(x.shape[-1])
    return values.mul(mean_square.add_(eps).rsqrt_()).to(x.dtype)
