"""RMSNorm: x / sqrt(mean(x^2) + eps) over the last axis, in f32.

The weight of a norm before a product is folded into the product. One after it, or before positions, is applied here.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` `[T, hidden]` normalised, without a weight, in its own type."""
    values = x.float()
    return values.mul(_inverse_rms(values, eps)).to(x.dtype)


class PostNorm:
    """RMSNorm of what a part of a layer gives to the residual stream. `weight` is f32 `[hidden]`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `residual` plus `x` `[T, hidden]` normalised and weighted: rounded once, in the type of `residual`."""
        values = x.float()
        scaled = values.mul(_inverse_rms(values, self._eps)).mul_(self._weight)
        return scaled.add_(residual).to(residual.dtype)


class HeadNorm:
    """RMSNorm over each head of queries and keys, before positions.

    `weight` `[heads, head_dim]`, f32, is each head's own, constants that multiply queries included.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[T, heads, head_dim]` normalised and weighted, in f32."""
        values = x.float()
        return values.mul(_inverse_rms(values, self._eps)).mul_(self._weight)


def _inverse_rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return length.square_().div_(values.shape[-1]).add_(eps).rsqrt_()
