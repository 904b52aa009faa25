"""`Products` by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from muser_prefill.kernels.exact.triton.launch import cdiv, launch
from muser_prefill.kernels.exact.triton.linear_kernel import linear_kernel
from muser_prefill.kernels.exact.triton.row_kernels import (
    activate_kernel,
    add_normed_kernel,
    gate_kernel,
    quantise_kernel,
)
from muser_wire.model.spec import Activation, as_f32
from muser_wire.reference.constants import WEIGHT_GROUP
from muser_wire.reference.linear import IntegerWeight, joined

ROWS, ROWS_WIDTH, ROWS_WARPS = 4, 64, 4
"""Rows, columns and warps of the kernels over rows."""
TILE_TOKENS, FEW_TOKENS, TILE_OUTPUTS, LINEAR_WARPS, LINEAR_STAGES = 64, 16, 128, 8, 4
"""Tokens of a tile of a linear layer, where there are few and otherwise; outputs, warps, and loads under way."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Rows as `muser_prefill.kernels.exact.triton.row_kernels` gives them."""

    high: torch.Tensor
    low: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    def all(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the kernels' order."""
        return self.high, self.low, self.scales, self.sums


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix of one form: int8 `[rows, columns]`, scales and offsets `[columns / group, rows]`."""

    weights: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int


class TritonProducts:
    """Contract: `muser_prefill.kernels.exact.Products`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def matrix(self, parts: Sequence[IntegerWeight]) -> list[Matrix]:
        """Return matrices, those of one form joined.

        Raises:
            ValueError: groups of 16 with offsets, which would need sums that activations do not carry; no format
                has them.
        """
        return [self._matrix(part) for part in joined(parts)]

    def _matrix(self, weight: IntegerWeight) -> Matrix:
        if weight.m is not None and weight.group != WEIGHT_GROUP:
            raise ValueError(f"offsets of groups of {weight.group} columns: groups have {WEIGHT_GROUP}")
        return Matrix(
            weights=self._moved(weight.q.reshape(weight.rows, -1)),
            scales=self._moved(weight.s.T),
            offsets=None if weight.m is None else self._moved(weight.m.T),
            group=weight.group,
        )

    def _moved(self, values: npt.NDArray[Any]) -> torch.Tensor:
        # A copy, because numpy's array may be read-only, which torch has no notion of.
        return torch.from_numpy(np.array(values, order="C")).to(self._device)

    def quantised(self, x: torch.Tensor) -> Activations:
        """Return rows as activations."""
        return self._quantised(x, None, 0.0)

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        """Return rows as activations after RMSNorm."""
        return self._quantised(x, weight, eps)

    def _quantised(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Activations:
        tokens, columns = x.shape
        to = self._activations(tokens, columns)
        arguments = (x, weight, to.all(), tokens, columns, as_f32(1.0 / columns), eps)
        launch(quantise_kernel, (cdiv(tokens, ROWS),), *arguments, rows=ROWS, width=ROWS_WIDTH, warps=ROWS_WARPS)
        return to

    def activated(self, gate_up: torch.Tensor, activation: Activation) -> Activations:
        """Return f(gate) * up as activations."""
        tokens, columns = len(gate_up), gate_up.shape[1] // 2
        to = self._activations(tokens, columns)
        gelu = activation is Activation.GELU_TANH
        grid = cdiv(tokens, ROWS), cdiv(columns, ROWS_WIDTH)
        arguments = (gate_up, to.all(), tokens, columns)
        launch(activate_kernel, grid, *arguments, gelu=gelu, rows=ROWS, width=ROWS_WIDTH, warps=ROWS_WARPS)
        return to

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> Activations:
        """Return x * sigmoid(gate) as activations."""
        tokens, columns = x.shape
        to = self._activations(tokens, columns)
        grid = cdiv(tokens, ROWS), cdiv(columns, ROWS_WIDTH)
        arguments = (x, gate, to.all(), tokens, columns, gate.stride(0))
        launch(gate_kernel, grid, *arguments, rows=ROWS, width=ROWS_WIDTH, warps=ROWS_WARPS)
        return to

    def _activations(self, tokens: int, columns: int) -> Activations:
        groups = columns // WEIGHT_GROUP
        high, low = (torch.empty(tokens, columns, dtype=torch.int8, device=self._device) for _ in range(2))
        scales, sums = (torch.empty(groups, tokens, device=self._device) for _ in range(2))
        return Activations(high, low, scales, sums)

    def product(self, x: Activations, matrix: list[Matrix], residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the products side by side, added to `residual`."""
        tokens, columns = x.high.shape
        outputs = sum(len(part.weights) for part in matrix)
        result = torch.empty(tokens, outputs, device=self._device)
        rows = FEW_TOKENS if tokens <= FEW_TOKENS else TILE_TOKENS
        first = 0
        for part in matrix:
            count = len(part.weights)
            launch(
                linear_kernel,
                (cdiv(tokens, rows), cdiv(count, TILE_OUTPUTS)),
                (x.high, x.low),
                (x.scales, x.sums),
                part.weights,
                (part.scales, part.offsets),
                None if residual is None else residual[:, first:],
                result[:, first:],
                *(tokens, count, columns, outputs),
                part=part.group,
                rows=rows,
                width=TILE_OUTPUTS,
                warps=LINEAR_WARPS,
                stages=LINEAR_STAGES,
            )
            first += count
        return result

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return residual + RMSNorm(x)."""
        tokens, columns = x.shape
        to = torch.empty_like(x)
        arguments = (residual, x, weight, to, tokens, columns, as_f32(1.0 / columns), eps)
        launch(add_normed_kernel, (cdiv(tokens, ROWS),), *arguments, rows=ROWS, width=ROWS_WIDTH, warps=ROWS_WARPS)
        return to
