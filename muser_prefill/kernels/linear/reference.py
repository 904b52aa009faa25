"""The reference: torch's own products over row-major weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, torch's own name for it

from muser_wire.model.spec import Activation


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

    def __init__(self, gate_up: torch.Tensor, activation: Activation) -> None:
        self._gate_up = gate_up
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `f(x gate^T) * (x up^T)`."""
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return activate(gate, self._activation).mul_(up)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return x sigmoid(x), or the Gaussian unit in the tanh form, x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
