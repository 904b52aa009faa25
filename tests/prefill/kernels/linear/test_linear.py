from __future__ import annotations

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.kernels import linear
from muser_prefill.kernels.linear import PACKED_KERNELS, PLAIN_KERNELS, LinearKernels
from muser_wire.model.spec import Activation
from muser_wire.numerics import budget

CPU = torch.device("cpu")
KERNELS = {"plain": PLAIN_KERNELS, "packed": PACKED_KERNELS}
BUDGETS = {torch.float32: "linear_f32", torch.bfloat16: "linear_bf16"}


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(shape[0]).normal(size=shape) * scale).to(dtype)


def error(got: torch.Tensor, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got.double().numpy() - expected).max())


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("tokens", [1, 2, 31, 129])
def test_products_are_what_float64_says(name: str, dtype: torch.dtype, tokens: int) -> None:
    x, residual = random(tokens, 67, dtype=dtype), random(tokens, 46, dtype=dtype, scale=0.3)
    weight = random(46, 67, dtype=dtype, scale=0.04)
    product = KERNELS[name].linear(weight.clone())
    expected = x.double().numpy() @ weight.double().numpy().T
    assert error(product(x), expected) <= budget(BUDGETS[dtype])
    assert error(product.add(x, residual), residual.double().numpy() + expected) <= budget(BUDGETS[dtype])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", [1, 33])
def test_gate_is_the_first_half(name: str, dtype: torch.dtype, activation: Activation, tokens: int) -> None:
    x, weight = random(tokens, 67, dtype=dtype), random(92, 67, dtype=dtype, scale=0.08)
    gate, up = np.split(x.double().numpy() @ weight.double().numpy().T, 2, axis=1)
    got = KERNELS[name].gated(weight.clone(), activation)(x)
    assert error(got, oracle_decoder.activate(gate, activation) * up) <= budget(BUDGETS[dtype])


def test_arguments_are_not_changed() -> None:
    x, residual = random(5, 67, dtype=torch.float32), random(5, 46, dtype=torch.float32)
    before = x.clone(), residual.clone()
    for kernels in KERNELS.values():
        kernels.linear(random(46, 67, dtype=torch.float32)).add(x, residual)
        kernels.gated(random(46, 67, dtype=torch.float32), Activation.SILU)(x)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("activation", Activation)
def test_packed_is_admitted_here(dtype: torch.dtype, activation: Activation) -> None:
    assert linear.choose_linear(activation, dtype, CPU) == (PACKED_KERNELS, (linear.PACKED,))


class Swapped(linear.PackedGatedLinear):
    def __init__(self, gate_up: torch.Tensor, activation: Activation) -> None:
        super().__init__(gate_up.roll(len(gate_up) // 2, 0), activation)


class OtherActivation(linear.PackedGatedLinear):
    def __init__(self, gate_up: torch.Tensor, activation: Activation) -> None:
        super().__init__(gate_up, next(other for other in Activation if other is not activation))


class WithoutResidual(linear.PackedLinear):
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x)


@pytest.mark.parametrize(
    "broken",
    [
        LinearKernels(linear.PackedLinear, Swapped),
        LinearKernels(linear.PackedLinear, OtherActivation),
        LinearKernels(WithoutResidual, linear.PackedGatedLinear),
    ],
    ids=["swapped-halves", "other-activation", "no-residual"],
)
@pytest.mark.parametrize("activation", Activation)
def test_broken_products_are_not_admitted(
    broken: LinearKernels, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "PACKED_KERNELS", broken)
    assert linear.choose_linear(activation, torch.bfloat16, CPU) == (PLAIN_KERNELS, ())


def test_a_build_without_the_operations_takes_the_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_prefill.kernels.linear.packed.torch.ops.mkldnn", object())
    assert linear.choose_linear(Activation.SILU, torch.float32, CPU) == (PLAIN_KERNELS, ())
