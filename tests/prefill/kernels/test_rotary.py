from __future__ import annotations

import numpy as np
import oracle_decoder
import pytest
import torch

from muser_prefill.kernels.rotary import FIRST_POSITIONS, RotaryTable
from muser_wire.model.spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec
from muser_wire.numerics import budget

CPU = torch.device("cpu")


@pytest.mark.parametrize("rotary_dim", [16, 10])
@pytest.mark.parametrize("start", [0, 1, 37])
def test_positions_count_from_start(rotary_dim: int, start: int) -> None:
    rope = RopeSpec(theta=10000.0, rotary_dim=rotary_dim)
    x = np.random.default_rng(0).normal(size=(60, 3, 16)).astype(np.float32)
    rotated = RotaryTable(rope, 16, CPU).rotate(torch.from_numpy(x[start:]), start)
    expected = oracle_decoder.rotate(x.astype(np.float64), rope)[start:]
    assert np.abs(rotated.numpy() - expected).max() <= budget("planes_f32")


@pytest.mark.parametrize("scaling", [LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 64)])
def test_stretched_positions(scaling: RopeScaling) -> None:
    rope = RopeSpec(theta=500.0, rotary_dim=16, scaling=scaling)
    x = np.random.default_rng(0).normal(size=(60, 3, 16)).astype(np.float32)
    rotated = RotaryTable(rope, 16, CPU).rotate(torch.from_numpy(x), 0)
    assert np.abs(rotated.numpy() - oracle_decoder.rotate(x.astype(np.float64), rope)).max() <= budget("planes_f32")
    plain = RotaryTable(RopeSpec(theta=500.0, rotary_dim=16), 16, CPU).rotate(torch.from_numpy(x), 0)
    assert not torch.equal(rotated, plain)


def test_far_positions_keep_their_precision() -> None:
    """Angles formed in f32 would be off by 4e-3 at position 65,535; the table's are rounded once, after the cosine."""
    rope = RopeSpec(theta=10000.0, rotary_dim=2)
    one = torch.tensor([[[1.0, 0.0]]])
    got = RotaryTable(rope, 2, CPU).rotate(one, 65_535)[0, 0]
    assert got.tolist() == pytest.approx([np.cos(65_535.0), np.sin(65_535.0)], abs=1e-7)


def test_positions_beyond_the_first_rows_are_the_same_ones() -> None:
    rope = RopeSpec(theta=10000.0, rotary_dim=8, scaling=LinearScaling(4.0))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 2, 8)).astype(np.float32))
    start = 3 * FIRST_POSITIONS + 7
    got = RotaryTable(rope, 8, CPU).rotate(x, start)
    whole = np.concatenate([np.zeros((start, 2, 8)), x.double().numpy()])
    assert np.abs(got.numpy() - oracle_decoder.rotate(whole, rope)[start:]).max() <= budget("planes_f32")


def test_the_argument_is_not_changed() -> None:
    x = torch.ones(4, 1, 8)
    RotaryTable(RopeSpec(theta=100.0, rotary_dim=8), 8, CPU).rotate(x, 2)
    assert torch.equal(x, torch.ones(4, 1, 8))
