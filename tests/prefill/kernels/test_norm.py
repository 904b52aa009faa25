from __future__ import annotations

import numpy as np
import oracle_llama
import torch

from muser_prefill.kernels.norm import rms_norm
from muser_wire.numerics import budget

X = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32) * 5


def test_rows_have_unit_mean_square() -> None:
    expected = oracle_llama.rms_norm(X.astype(np.float64), np.ones(33), 1e-5)
    assert np.abs(rms_norm(torch.from_numpy(X), 1e-5).numpy() - expected).max() <= budget("attention_f32")


def test_epsilon_is_added_to_the_mean_square() -> None:
    assert rms_norm(torch.full((1, 4), 1.5), 1.75).tolist() == [[0.75] * 4]
    assert rms_norm(torch.zeros(1, 4), 1e-5).tolist() == [[0.0] * 4]


def test_bf16_is_computed_in_f32_and_rounded_once() -> None:
    x = torch.from_numpy(X).bfloat16()
    assert torch.equal(rms_norm(x, 1e-5), rms_norm(x.float(), 1e-5).bfloat16())


def test_the_argument_is_not_changed() -> None:
    x = torch.full((2, 4), 3.0)
    rms_norm(x, 1e-5)
    assert torch.equal(x, torch.full((2, 4), 3.0))
