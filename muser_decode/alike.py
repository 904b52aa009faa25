"""How many rows of a product may be computed by one call, by the BLAS at hand, so that none depends on the others.

A BLAS chooses among its kernels by the number of rows, and they add in different orders: OpenBLAS 0.3.21 has one order
for few rows and one for many on processors with AVX-512, and others at every edge of its blocks elsewhere. Which it is
shows in the results, so it is measured, for each number of columns, at the first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

FEW_ROWS = 64
"""So many rows may be steps of different requests, whose results must not depend on one another."""

MANY_ROWS = (65, 66, 68, 71, 76, 95, 128, 193, 512)
"""Numbers of rows that meet the edges of kernels for blocks of 2 to 48 rows, and of blocks of some hundred."""


@dataclass(frozen=True)
class Alike:
    """Up to `few` rows of one call are each what they are alone.

    `many` says that a row is the same in every call of more than FEW_ROWS.
    """

    few: int
    many: bool


@lru_cache
def alike(columns: int, width: int, dtype: mx.Dtype) -> Alike:
    """Return what holds for products `[rows, columns] @ [columns, width]` of this type."""
    random = np.random.default_rng(0)
    matrix = mx.array(random.standard_normal((1, columns, width), np.float32)).astype(dtype)
    rows = mx.array(random.standard_normal((MANY_ROWS[-1], columns), np.float32)).astype(dtype)

    def product(some: mx.array) -> mx.array:
        return (some[None] @ matrix)[0]

    alone = mx.concatenate([product(rows[at : at + 1]) for at in range(FEW_ROWS)])
    few = next((m - 1 for m in range(2, FEW_ROWS + 1) if not _same(product(rows[:m]), alone[:m])), FEW_ROWS)
    whole = product(rows)
    many = all(_same(product(rows[at : at + m]), whole[at : at + m]) for m in MANY_ROWS[:-1] for at in (0, 3))
    return Alike(few, many)


def _same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one, other).item())
