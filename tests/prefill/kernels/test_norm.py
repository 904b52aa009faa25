from __future__ import annotations

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.kernels.norm import HeadNorm, PostNorm, rms_norm
from muser_wire.numerics import budget

X = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32) * 5


def test_rows_have_unit_mean_square() -> None:
    expected = oracle_decoder.rms_norm(X.astype(np.float64), np.ones(33), 1e-5)
    assert np.abs(rms_norm(torch.from_numpy(X), 1e-5).numpy() - expected).max() <= budget("attention_f32")


def test_epsilon_is_added_to_the_mean_square() -> None:
    assert rms_norm(torch.full((1, 4), 1.5), 1.75).tolist() == [[0.75] * 4]
    assert rms_norm(torch.zeros(1, 4), 1e-5).tolist() == [[0.0] * 4]


def test_bf16_is_computed_in_f32_and_rounded_once() -> None:
    x = torch.from_numpy(X).bfloat16()
    assert torch.equal(rms_norm(x, 1e-5), rms_norm(x.float(), 1e-5).bfloat16())


def test_a_head_norm_has_a_weight_for_each_head() -> None:
    x, weight = X.reshape(7, 3, 11), np.random.default_rng(1).normal(size=(3, 11)).astype(np.float32)
    got = HeadNorm(torch.from_numpy(weight), 1e-6)(torch.from_numpy(x).bfloat16())
    rounded = torch.from_numpy(x).bfloat16().double().numpy()
    assert got.dtype == torch.float32
    expected = oracle_decoder.rms_norm(rounded, weight.astype(np.float64), 1e-6)
    assert np.abs(got.numpy() - expected).max() <= budget("attention_f32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_post_norm_is_added_in_f32_and_rounded_once(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    weight = torch.from_numpy(rng.normal(size=33).astype(np.float32))
    residual, x = (torch.from_numpy(values).to(dtype) for values in rng.normal(size=(2, 7, 33)))
    got = PostNorm(weight, 1e-8).add(residual, x)
    normalised = oracle_decoder.rms_norm(x.double().numpy(), weight.double().numpy(), 1e-8)
    expected = torch.from_numpy(residual.double().numpy() + normalised)
    assert got.dtype == dtype
    # Half a unit in the last place, or the f32 sums in another order.
    within = budget("attention_f32") if dtype == torch.float32 else expected.abs() * 2**-8
    assert ((got.double() - expected).abs() <= within).all()


def test_the_argument_is_not_changed() -> None:
    x, weight = torch.full((2, 4), 3.0), torch.ones(4)
    rms_norm(x, 1e-5)
    HeadNorm(weight, 1e-5)(x[:, None])
    PostNorm(weight, 1e-5).add(x, x)
    assert torch.equal(x, torch.full((2, 4), 3.0))
