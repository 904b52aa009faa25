from __future__ import annotations

import exact_kernels
import numpy as np
import torch
from exact_kernels import floats, matrix, same_bytes

from muser_wire.reference.linear import joined, linear, linear_arrays, quantised_input
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic


def test_neighbours_of_one_form_become_one_matrix() -> None:
    rng = np.random.default_rng(0)
    parts = [matrix(rng, rows, 64, kind) for rows, kind in ((3, 0), (5, 0), (2, 1), (4, 1), (1, 0), (6, 2))]
    found = joined(parts)
    assert [(part.rows, part.group, part.m is None) for part in found] == [
        (8, 32, True),
        (6, 32, False),
        (1, 32, True),
        (6, 16, True),
    ]
    values = np.concatenate([part.values() for part in found])
    assert np.array_equal(values, np.concatenate([part.values() for part in parts]))


def test_products_of_several_forms_lie_side_by_side() -> None:
    ar = NumpyArithmetic()
    rng = np.random.default_rng(1)
    x = floats(rng, 5, 64)
    parts = [matrix(rng, rows, 64, kind) for rows, kind in ((3, 0), (2, 1), (4, 2))]
    kernel = exact_kernels.plain().products

    got = kernel.product(kernel.quantised(torch.from_numpy(x)), kernel.matrix(parts))
    expected = [linear(ar, quantised_input(ar, x), linear_arrays(ar, part)) for part in parts]
    same_bytes(got, np.concatenate(expected, 1))
