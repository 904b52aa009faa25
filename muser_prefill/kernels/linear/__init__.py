"""The decoder's matrix products: which implementation a device uses.

A `Linear` holds `w` `[out, in]` and gives `x w^T` for `x` `[T, in]`. A `GatedLinear` holds a gate and an up matrix
`[ffn, in]` each and gives `f(x gate^T) * (x up^T)`, f being the model's activation. Sums are f32, results have the type
of `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from muser_prefill.kernels.admission import admit, fixed_vector
from muser_prefill.kernels.linear.packed import PackedGatedLinear, PackedLinear
from muser_prefill.kernels.linear.reference import PlainGatedLinear, PlainLinear
from muser_prefill.numerics import COMPUTE_NAMES
from muser_wire.model.spec import Activation
from muser_wire.numerics import budget

PACKED = "linear.packed"

# Odd sizes on every axis, and more outputs than one block of any kernel.
ADMISSION_TOKENS, ADMISSION_IN, ADMISSION_OUT = 37, 131, 197


class Linear(Protocol):
    """See the module."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x w^T`."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual + x w^T`."""


class GatedLinear(Protocol):
    """See the module."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `f(x gate^T) * (x up^T)`."""


@dataclass(frozen=True)
class LinearKernels:
    """How weights become products. Each takes over its argument: nothing else of it stays alive."""

    linear: Callable[[torch.Tensor], Linear]
    gated: Callable[[torch.Tensor, Activation], GatedLinear]
    """Takes gate and up as one `[2 * ffn, in]`."""


PLAIN_KERNELS = LinearKernels(PlainLinear, PlainGatedLinear)
PACKED_KERNELS = LinearKernels(PackedLinear, PackedGatedLinear)


def choose_linear(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> tuple[LinearKernels, tuple[str, ...]]:
    """Return the products for this device and the names of the special kernels that they use."""
    if device.type == "cpu" and admit_linear(PACKED, PACKED_KERNELS, activation, dtype):
        return PACKED_KERNELS, (PACKED,)
    return PLAIN_KERNELS, ()


def admit_linear(name: str, kernels: LinearKernels, activation: Activation, dtype: torch.dtype) -> bool:
    """Return whether `kernels` agrees with the plain products on the fixed vector."""
    cpu = torch.device("cpu")
    x = fixed_vector((ADMISSION_TOKENS, ADMISSION_IN), 1, dtype, cpu)
    w = fixed_vector((2 * ADMISSION_OUT, ADMISSION_IN), 2, dtype, cpu) * (ADMISSION_IN**-0.5 / 2)
    residual = fixed_vector((ADMISSION_TOKENS, 2 * ADMISSION_OUT), 3, dtype, cpu) / 2

    def outputs(candidate: LinearKernels) -> torch.Tensor:
        linear = candidate.linear(w.clone())
        return torch.cat([linear(x), linear.add(x, residual), candidate.gated(w.clone(), activation)(x)], dim=1)

    max_abs = budget(f"linear_{COMPUTE_NAMES[dtype]}")
    return admit(name, lambda: outputs(kernels), lambda: outputs(PLAIN_KERNELS), max_abs)
