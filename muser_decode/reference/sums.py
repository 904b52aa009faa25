"""Sums in the lane's order: terms ascending, each addition rounded."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

PROBES = (
    *(((7, 64), 0), ((48, 192), 0), ((18, 3, 5, 64), 0), ((3, 9, 65), 1), ((2, 5, 6, 257), 1), ((4, 31, 64), 1)),
    *(((300, 2, 3, 64), 0), ((1, 90, 2, 2, 2, 2, 2, 2), 1), ((2, 513, 3, 65), 1)),
)
"""Shapes and axes that the lane sums over; the first axis after the summed one is never of size 1.

Few terms and many, for which a library may take another way: groups of a matrix, lanes of a norm, blocks of keys.
"""

PROBE_EXPONENTS = (-12, 12)
"""Terms of such different sizes that another order gives another sum in nearly every place."""


def ordered_sum(x: mx.array, axis: int) -> mx.array:
    """Return the sum over an axis that is not the last, which stays with size 1."""
    if library_adds_in_order():
        return mx.sum(x, axis=axis, keepdims=True)
    return added_one_by_one(x, axis)


def added_one_by_one(x: mx.array, axis: int) -> mx.array:
    """Return the same by additions written out: an operation for each term."""
    first, *rest = mx.split(x, x.shape[axis], axis)
    for term in rest:
        first = first + term
    return first


@functools.cache
def library_adds_in_order() -> bool:
    """Say whether `mx.sum` over such an axis adds ascending: the CPU's does, row after row; a GPU's need not.

    Found by trying, once, on the default device.
    """
    numbers = np.random.default_rng(0)
    for shape, axis in PROBES:
        terms = numbers.standard_normal(shape) * np.exp2(numbers.integers(*PROBE_EXPONENTS, shape))
        x = mx.array(terms.astype(np.float32))
        if not mx.array_equal(mx.sum(x, axis=axis, keepdims=True), added_one_by_one(x, axis)):
            return False
    return True
