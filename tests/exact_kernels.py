"""The reference lane's kernels for tests, compiled once, and random inputs that reach over many powers of two."""

from __future__ import annotations

import functools

import numpy as np
import torch

from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.kernels.exact.compiled import compiled_kernels
from muser_prefill.kernels.exact.reference import plain_kernels
from muser_wire.home import muser_home
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.linear import IntegerWeight

CPU = torch.device("cpu")


@functools.cache
def compiled() -> ExactKernels:
    """The compiled kernels; a machine without a C++ compiler fails here, and says so."""
    return compiled_kernels(load(shared_object(muser_home() / "kernels")))


def plain() -> ExactKernels:
    return plain_kernels(CPU)


def floats(rng: np.random.Generator, *shape: int, low: int = -8, high: int = 4) -> np.ndarray:
    return (rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape))).astype(np.float32)


def matrix(rng: np.random.Generator, rows: int, columns: int, kind: int) -> IntegerWeight:
    """Kinds: 0 groups of 32, 1 with offsets, 2 groups of 16."""
    group = 16 if kind == 2 else 32
    q = rng.integers(-128, 128, (rows, columns // group, group)).astype(np.int8)
    s, m = (floats(rng, rows, columns // group, high=0) for _ in range(2))
    return IntegerWeight(q, s, m if kind == 1 else None)


def same_bytes(got: torch.Tensor, expected: np.ndarray | torch.Tensor) -> None:
    """Both zeros count as one: what follows them cannot tell."""
    a, b = np.asarray(got) + got.numpy().dtype.type(0), np.asarray(expected)
    b = b + b.dtype.type(0)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == np.ascontiguousarray(b).tobytes(), f"{int((a != b).sum())} of {a.size} values differ"
