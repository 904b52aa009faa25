"""The operations as compiled kernels: what a CPU uses. `muser_wire.reference.compiled` has them, over numpy arrays that
share the tensors' memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from muser_prefill.kernels.exact import ExactKernels, HeadNorm, Positions, Sight
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import View
from muser_wire.reference.compiled import operations
from muser_wire.reference.compiled.operations import Operations, Panels, Planes
from muser_wire.reference.linear import IntegerWeight
from muser_wire.reference.rope import RopeTable


def compiled_kernels(library: ctypes.CDLL) -> ExactKernels:
    """Return the kernels of a loaded library."""
    compiled = Operations(library, torch.get_num_threads)
    return ExactKernels(CompiledProducts(compiled), CompiledHeads(compiled), CompiledAttention(compiled))


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows as integers `[T, n]` int16, the power of two of each group of 32, and the group's integer sum times it."""

    values: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


class CompiledProducts:
    """Contract: `muser_prefill.kernels.exact.Products`. CPU only."""

    def __init__(self, compiled: Operations) -> None:
        self._operations = compiled

    def matrix(self, parts: Sequence[IntegerWeight]) -> list[Panels]:
        """Return matrices, those of one form joined."""
        return self._operations.matrix(parts)

    def quantised(self, x: torch.Tensor) -> Activations:
        """Return rows as activations."""
        return _tensors(self._operations.quantised(_array(x)))

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        """Return rows as activations after RMSNorm."""
        return _tensors(self._operations.normed(_array(x), _array(weight), eps))

    def activated(self, gate_up: torch.Tensor, activation: Activation) -> Activations:
        """Return f(gate) * up as activations."""
        return _tensors(self._operations.activated(_array(gate_up), activation))

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> Activations:
        """Return x * sigmoid(gate) as activations."""
        return _tensors(self._operations.gated(_array(x), _array(gate)))

    def product(self, x: Activations, matrix: list[Panels], residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the products side by side, added to `residual`."""
        rows = operations.Activations(_array(x.values), _array(x.scales), _array(x.sums))
        added = None if residual is None else _array(residual)
        return torch.from_numpy(self._operations.product(rows, matrix, added))

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return residual + RMSNorm(x)."""
        return torch.from_numpy(self._operations.added(_array(residual), _array(x), _array(weight), eps))


class CompiledHeads:
    """Contract: `muser_prefill.kernels.exact.Heads`. CPU only."""

    def __init__(self, compiled: Operations) -> None:
        self._operations = compiled

    def turned(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return heads after their norm and positions."""
        return torch.from_numpy(self._operations.turned(_array(x), _norm(norm), _table(positions)))

    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return the same rounded to float16."""
        return torch.from_numpy(self._operations.plane(_array(x), _norm(norm), _table(positions)))


class CompiledAttention:
    """Contract: `muser_prefill.kernels.exact.Attention`. CPU only."""

    def __init__(self, compiled: Operations) -> None:
        self._operations = compiled

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        """Return attention over planes, whose integers are derived there."""
        view = View(sight.start, sight.first, sight.window, scale)
        planes = Planes(_array(keys), _array(values))
        return torch.from_numpy(self._operations.attended(_array(q), planes, view))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as an array."""
    array: npt.NDArray[Any] = np.asarray(tensor.numpy())
    return array


def _tensors(rows: operations.Activations) -> Activations:
    return Activations(*(torch.from_numpy(part) for part in (rows.values, rows.scales, rows.sums)))


def _norm(norm: HeadNorm | None) -> operations.HeadNorm | None:
    if norm is None:
        return None
    return operations.HeadNorm(None if norm.weight is None else _array(norm.weight), norm.eps)


def _table(positions: Positions | None) -> RopeTable | None:
    return None if positions is None else RopeTable(_array(positions.cos), _array(positions.sin))
