"""The reference: the lane's own text over torch's plain operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muser_prefill.kernels.exact import ExactKernels, HeadNorm, Positions, Sight
from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import View, attention
from muser_wire.reference.exp2 import activated, sigmoid
from muser_wire.reference.linear import IntegerWeight, LinearArrays, joined, linear, linear_arrays, quantised_input
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.planes import key_integers, plane, value_integers
from muser_wire.reference.quantise import Quantised
from muser_wire.reference.rope import rotated


def plain_kernels(device: torch.device) -> ExactKernels:
    """Return the plain operations on a device."""
    ar = TorchArithmetic(device)
    return ExactKernels(PlainProducts(ar), PlainHeads(ar), PlainAttention(ar))


class PlainProducts:
    """Contract: `muser_prefill.kernels.exact.Products`."""

    def __init__(self, ar: TorchArithmetic) -> None:
        self._ar = ar

    def matrix(self, parts: Sequence[IntegerWeight]) -> list[LinearArrays]:
        """Return matrices, those of one form joined."""
        return [linear_arrays(self._ar, part) for part in joined(parts)]

    def quantised(self, x: torch.Tensor) -> Quantised:
        """Return rows as activations."""
        return quantised_input(self._ar, x)

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Quantised:
        """Return rows as activations after RMSNorm."""
        return self.quantised(rms_norm(self._ar, x, weight, eps))

    def activated(self, gate_up: torch.Tensor, activation: Activation) -> Quantised:
        """Return f(gate) * up as activations."""
        gate, up = gate_up.chunk(2, -1)
        return self.quantised(activated(self._ar, gate, up, activation))

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> Quantised:
        """Return x * sigmoid(gate) as activations."""
        return self.quantised(x * sigmoid(self._ar, gate))

    def product(self, x: Quantised, matrix: list[LinearArrays], residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the products side by side, added to `residual`."""
        result = torch.cat([linear(self._ar, x, part) for part in matrix], -1)
        return result if residual is None else residual + result

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return residual + RMSNorm(x)."""
        total: torch.Tensor = residual + rms_norm(self._ar, x, weight, eps)
        return total


class PlainHeads:
    """Contract: `muser_prefill.kernels.exact.Heads`."""

    def __init__(self, ar: TorchArithmetic) -> None:
        self._ar = ar

    def turned(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return heads after their norm and positions."""
        if norm is not None:
            x = rms_norm(self._ar, x, norm.weight, norm.eps)
        if positions is not None:
            x = rotated(self._ar, x, positions.cos[:, None], positions.sin[:, None])
        return x.contiguous()

    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return the same rounded to float16."""
        rounded: torch.Tensor = plane(self._ar, self.turned(x, norm, positions))
        return rounded


class PlainAttention:
    """Contract: `muser_prefill.kernels.exact.Attention`."""

    def __init__(self, ar: TorchArithmetic) -> None:
        self._ar = ar

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        """Return attention over planes, whose integers are derived here."""
        ar = self._ar
        view = View(sight.start, sight.first, sight.window, scale)
        out: torch.Tensor = attention(ar, q, key_integers(ar, keys), value_integers(ar, values), view)
        return out.reshape(len(q), -1)
