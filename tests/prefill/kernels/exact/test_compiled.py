"""The compiled kernels against the lane's text over numpy, at odd shapes and with poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator

import exact_kernels
import numpy as np
import pytest
import torch
from exact_kernels import floats, matrix, same_bytes

from muser_prefill.kernels.exact import HeadNorm, Positions, Sight
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.compiled import operations
from muser_wire.reference.exp2 import activated, sigmoid
from muser_wire.reference.linear import IntegerWeight, linear, linear_arrays, quantised_input
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import key_integers, plane, value_integers
from muser_wire.reference.rope import rotated

AR = NumpyArithmetic(np.float64)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel should fill holds NaN, or the integer that a mistake would not give, before it."""

    class Poisoned:
        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        def empty(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
            return np.full(shape, np.nan if issubclass(dtype, np.floating) else -32768, dtype)

    monkeypatch.setattr(operations, "np", Poisoned())


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.copy())


def product(rows: np.ndarray, weights: list[IntegerWeight]) -> np.ndarray:
    return np.concatenate([linear(AR, quantised_input(AR, rows), linear_arrays(AR, w)) for w in weights], 1)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13, 300])
@pytest.mark.parametrize(("columns", "outputs"), [(32, (1,)), (96, (31, 33, 64)), (288, (200, 7))])
def test_linear_layers(tokens: int, columns: int, outputs: tuple[int, ...], threads: int) -> None:
    rng = np.random.default_rng(tokens + columns)
    weights = [matrix(rng, rows, columns, (i + tokens) % 3) for i, rows in enumerate(outputs)]
    x, residual = floats(rng, tokens, columns, low=-30), floats(rng, tokens, sum(outputs))
    kernel = exact_kernels.compiled().products
    made, rows = kernel.matrix(weights), kernel.quantised(tensor(x))
    expected = product(x, weights)
    same_bytes(kernel.product(rows, made), expected)
    same_bytes(kernel.product(rows, made, tensor(residual)), residual + expected)


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("columns", [32, 64, 160, 576])
def test_what_becomes_of_rows(tokens: int, columns: int, threads: int) -> None:
    rng = np.random.default_rng(columns)
    x, gate, w = floats(rng, tokens, columns), floats(rng, tokens, columns), floats(rng, columns)
    x[0, :32] = 0
    kernel, weights = exact_kernels.compiled().products, [matrix(rng, 5, columns, 1)]
    made, both = kernel.matrix(weights), tensor(np.concatenate([gate, x], 1))
    same_bytes(
        kernel.product(kernel.normed(tensor(x), tensor(w), 1e-5), made), product(rms_norm(AR, x, w, 1e-5), weights)
    )
    same_bytes(
        kernel.product(kernel.gated(tensor(x), both[:, :columns]), made), product(x * sigmoid(AR, gate), weights)
    )
    for activation in Activation:
        rows = kernel.activated(both, activation)
        same_bytes(kernel.product(rows, made), product(activated(AR, gate, x, activation), weights))
    same_bytes(kernel.added(tensor(gate), tensor(x), tensor(w), 1e-6), gate + rms_norm(AR, x, w, 1e-6))


@pytest.mark.parametrize("head_dim", [2, 8, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [None, False, True])
def test_heads(head_dim: int, normed: bool | None, threads: int) -> None:
    rng = np.random.default_rng(head_dim)
    every = floats(rng, 11, 5, head_dim, low=-20, high=18)
    x = every[:, 1:4]
    weight = floats(rng, head_dim)
    norm = None if normed is None else HeadNorm(tensor(weight) if normed else None, 1e-6)
    for half in (0, head_dim // 4, head_dim // 2):
        cos, sin = floats(rng, 11, half), floats(rng, 11, half)
        positions = Positions(tensor(cos), tensor(sin)) if half else None
        expected = x if normed is None else rms_norm(AR, x, weight if normed else None, 1e-6)
        expected = rotated(AR, expected, cos[:, None], sin[:, None]) if half else expected
        heads = exact_kernels.compiled().heads
        same_bytes(heads.turned(tensor(every)[:, 1:4], norm, positions), expected)
        same_bytes(heads.plane(tensor(every)[:, 1:4], norm, positions), plane(AR, expected))


def test_planes_at_every_edge_of_their_rounding() -> None:
    edges = np.arange(0x38000000, 0x39000000, 251, dtype=np.uint32).view(np.float32)
    large = np.arange(0x477FD000, 0x47810000, 7, dtype=np.uint32).view(np.float32)
    halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1024:31743] + halves[1025:31744]) / 2
    x = np.concatenate([edges, large, between, [0.0, 3e38]]).astype(np.float32)
    x = np.concatenate([x, -x])[: len(x) // 32 * 32].reshape(-1, 1, 32)
    same_bytes(exact_kernels.compiled().heads.plane(tensor(x), None, None), plane(AR, x))


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "repeats", "tokens", "prefix", "window"),
    [
        (64, 3, 3, 70, 0, None),
        (64, 2, 4, 1, 200, None),
        (64, 1, 1, 130, 63, 64),
        (128, 1, 5, 33, 129, 1),
        (256, 1, 4, 65, 64, 100),
        (80, 2, 1, 90, 37, 40),
        (96, 1, 2, 7, 120, None),
        (16, 2, 3, 100, 5, 7),
        (2, 1, 1, 3, 0, None),
    ],
)
def test_attention(
    head_dim: int, kv_heads: int, repeats: int, tokens: int, prefix: int, window: int | None, threads: int
) -> None:
    rng = np.random.default_rng(head_dim + tokens)
    k, v = (plane(AR, floats(rng, prefix + tokens, kv_heads, head_dim, low=-12)) for _ in range(2))
    v[:3] = 0
    q = floats(rng, tokens, kv_heads * repeats, head_dim, low=-3)
    scale = score_scale(head_dim**-0.5)
    expected = attention(AR, q, key_integers(AR, k), value_integers(AR, v), View(prefix, 0, window, scale))
    # Planes may begin anywhere up to the first position that is seen.
    lowest = 0 if window is None else max(0, prefix - window + 1)
    for first in {0, lowest // 2 if window else 0, lowest}:
        sight = Sight(prefix, first, window)
        got = exact_kernels.compiled().attention.attended(tensor(q), tensor(k[first:]), tensor(v[first:]), sight, scale)
        same_bytes(got, expected.reshape(tokens, -1))


def test_flushing_subnormals_changes_nothing() -> None:
    rng = np.random.default_rng(9)
    x, w = floats(rng, 9, 96, low=-140, high=3), floats(rng, 96, low=-60)
    weights = [matrix(rng, 40, 96, kind) for kind in range(3)]
    expected = product(rms_norm(AR, x, w, 1e-5), weights)
    kernel = exact_kernels.compiled().products
    made = kernel.matrix(weights)
    before = torch.get_num_threads()
    try:
        # The setting is of a thread, and only the calling one has it.
        torch.set_num_threads(1)
        assert torch.set_flush_denormal(True)
        same_bytes(kernel.product(kernel.normed(tensor(x), tensor(w), 1e-5), made), expected)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_arguments_are_not_changed() -> None:
    rng = np.random.default_rng(1)
    x, w = tensor(floats(rng, 7, 64)), tensor(floats(rng, 64))
    before = x.clone(), w.clone()
    kernel = exact_kernels.compiled().products
    rows = kernel.normed(x, w, 1e-5)
    kernel.product(rows, kernel.matrix([matrix(rng, 64, 64, 0)]), x)
    kernel.added(x, x, w, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
