"""The reference lane's operations [N3 to N8]: which implementation a device uses. All give the same bytes.

Tensors are contiguous float32 unless said otherwise. Shapes are the caller's duty.

- `Products`: RMSNorm, activation and quantisation of rows, and linear layers over the result. What `normed` and its
  siblings return, and what `matrix` returns, only the same implementation reads.
- `Heads`: norm and positions of queries and keys, and the rounding to planes.
- `Attention`: attention over planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from muser_wire.model.spec import Activation
from muser_wire.reference.linear import IntegerWeight


class Products(Protocol):
    """See the module. `x` is `[T, n]`, n a multiple of 32."""

    def matrix(self, parts: Sequence[IntegerWeight]) -> Any:
        """Return matrices, row after row, as `product` takes them."""

    def quantised(self, x: torch.Tensor) -> Any:
        """Return rows as activations."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        """Return rows as activations after RMSNorm."""

    def activated(self, gate_up: torch.Tensor, activation: Activation) -> Any:
        """Return `[T, 2 n]`, gate and up, as activations of f(gate) * up."""

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> Any:
        """Return x * sigmoid(gate) as activations; the rows of `gate` may lie further apart."""

    def product(self, x: Any, matrix: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[T, rows of the matrix]`, added to `residual` where there is one."""

    def added(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return residual + RMSNorm(x)."""


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm over head_dim; `weight` `[head_dim]` or None."""

    weight: torch.Tensor | None
    eps: float


@dataclass(frozen=True, eq=False)
class Positions:
    """Cosines and sines of the rows' positions, `[T, rotary_dim / 2]`."""

    cos: torch.Tensor
    sin: torch.Tensor


class Heads(Protocol):
    """See the module. `x` is `[T, heads, head_dim]`, its rows perhaps further apart, each row contiguous."""

    def turned(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return heads after their norm and positions."""

    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        """Return the same rounded to float16, as it travels."""


@dataclass(frozen=True)
class Sight:
    """What queries see: positions of the first query and of the planes' first row; the window.

    A query at p sees the key at k when 0 <= p - k < `window`; None sees every k <= p.
    """

    start: int
    first: int
    window: int | None


class Attention(Protocol):
    """`scale` is `muser_wire.reference.attention.score_scale` of the model's."""

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        """Return `[T, heads * head_dim]` of queries `[T, heads, head_dim]` over float16 planes
        `[held, kv_heads, head_dim]` from `sight.first` to the last query's position.
        """


@dataclass(frozen=True)
class ExactKernels:
    """One implementation of each, and the names of those that are not plain operations."""

    products: Products
    heads: Heads
    attention: Attention
    admitted: tuple[str, ...] = ()
