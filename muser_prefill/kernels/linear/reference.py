"""The reference: torch's own products over row-major weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it


class PlainLinear:
    """Contract: `muser_prefill.kernels.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x w^T`."""
        return F.linear(x, self._weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual + x w^T`."""
        return torch.addmm(residual, x, self._weight.T)


class PlainGatedLinear:
    """Contract: `muser_prefill.kernels.linear`. One product for gate and up together."""

    def __init__(self, gate_up: torch.Tensor) -> None:
        self._gate_up = gate_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(x gate^T) * (x up^T)`."""
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
