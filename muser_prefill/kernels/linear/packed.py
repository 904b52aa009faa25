"""Products of oneDNN over weights that are reordered once, at load, instead of in every call.

At 128 tokens the reordering is a seventh of a bf16 product and a quarter of an f32 one. The sum's last step also takes
what comes after it: the residual, or the activation and the product with the gate, so that these cost no pass over
memory. The operations are torch's own, but not public: a build without them, or one where they changed, is not admitted
and the plain products stand in.

Sums are f32; a residual is added before the one rounding.
"""

from __future__ import annotations

import torch

from muser_wire.model.spec import Activation

LAST_STEPS = {Activation.SILU: ("swish", ""), Activation.GELU_TANH: ("gelu", "tanh")}
"""oneDNN's name of each activation, and of its variant."""


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` in oneDNN's own layout, for any number of rows of x."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # noqa: SLF001
    return packed


class PackedLinear:
    """Contract: `muser_prefill.kernels.linear`. CPU only."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = _packed(weight)
        self._product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x w^T`."""
        product: torch.Tensor = self._product(x, self._weight, None, "none", [], "")
        return product

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual + x w^T`."""
        total: torch.Tensor = self._product.binary(x, residual, self._weight, None, "add")
        return total


class PackedGatedLinear:
    """Contract: `muser_prefill.kernels.linear`. CPU only.

    Two products, because each has its own last step: the activation, then the product with the first one's result.
    """

    def __init__(self, gate_up: torch.Tensor, activation: Activation) -> None:
        self._last_step, self._variant = LAST_STEPS[activation]
        self._gate, self._up = (_packed(half) for half in gate_up.chunk(2))
        self._product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `f(x gate^T) * (x up^T)`."""
        gate = self._product(x, self._gate, None, self._last_step, [], self._variant)
        gated: torch.Tensor = self._product.binary(x, gate, self._up, None, "mul")
        return gated
