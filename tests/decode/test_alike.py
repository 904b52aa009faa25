from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from muser_decode.alike import FEW_ROWS, alike

SCRIPT = """
from muser_decode.blas import load_blas
print(load_blas())
import mlx.core as mx
import numpy as np
from muser_decode.linear import Tiles

random = np.random.default_rng(1)
for columns in (64, 576, 1536):
    matrix = Tiles(mx.array(random.standard_normal((2, columns, 64), np.float32)), 100)
    x = mx.array(random.standard_normal((300, columns), np.float32))
    alone = mx.concatenate([matrix(x[at : at + 1]) for at in range(64)])
    for rows in range(2, 65):
        assert mx.array_equal(matrix(x[:rows], apart=True), alone[:rows]), (columns, rows)
    whole = matrix(x)
    for rows in (65, 71, 100, 128, 129, 255):
        assert mx.array_equal(matrix(x[:rows]), whole[:rows]), (columns, rows)
    assert mx.array_equal(matrix(x[128:]), whole[128:]), columns
    assert np.abs(np.array(whole) - np.array(x) @ np.array(matrix.rows(mx.arange(100))).T).max() < 1e-3
"""


def kernels() -> list[str]:
    """The sets of kernels of OpenBLAS that this processor has; none where it is another architecture."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return []
    needs = {"Prescott": "sse3", "Haswell": "avx2", "SkylakeX": "avx512vl"}
    return [name for name, flag in needs.items() if flag in flags or (flag == "sse3" and "pni" in flags)]


@pytest.mark.parametrize("name", ["", *kernels()])
def test_a_row_does_not_depend_on_the_others_whatever_kernels_the_blas_takes(name: str) -> None:
    chosen = {"OPENBLAS_CORETYPE": name} if name else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **chosen}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_measured_holds() -> None:
    few = alike(576, 64, mx.float32).few
    assert 1 <= few <= FEW_ROWS
    rows = mx.random.normal((few, 576), key=mx.random.key(1))
    matrix = mx.random.normal((1, 576, 64), key=mx.random.key(2))
    alone = mx.concatenate([rows[at : at + 1][None] @ matrix for at in range(few)], axis=1)
    assert mx.array_equal(rows[None] @ matrix, alone)
