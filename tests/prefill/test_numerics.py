from __future__ import annotations

import pytest
import torch

from muser_prefill.errors import UnknownComputeType
from muser_prefill.numerics import compute_dtype, round_into

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0 + 2.0**-11, 1.0),  # half way: to even, down
        (1.0 + 3 * 2.0**-11, 1.0 + 2.0**-9),  # half way: to even, up
        (65504.0, 65504.0),
        (65520.0, 65504.0),  # would round to infinity
        (1e30, 65504.0),
        (-1e30, -65504.0),
        (INF, 65504.0),
    ],
)
def test_f16_rounds_to_nearest_even_and_clamps(value: float, rounded: float) -> None:
    plane = torch.zeros(1, dtype=torch.float16)
    round_into(plane, torch.tensor([value]))
    assert plane.item() == rounded


@pytest.mark.parametrize(
    ("value", "rounded"), [(1.0 + 2.0**-8, 1.0), (1.0 + 3 * 2.0**-8, 1.0 + 2.0**-6), (1e30, 202 * 2.0**92)]
)
def test_bf16_rounds_to_nearest_even_and_keeps_its_range(value: float, rounded: float) -> None:
    plane = torch.zeros(1, dtype=torch.bfloat16)
    round_into(plane, torch.tensor([value]))
    assert plane.item() == rounded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    plane = torch.zeros(1, dtype=dtype)
    round_into(plane, torch.tensor([NAN]))
    assert plane.isnan().all()


def test_compute_types_by_name() -> None:
    assert (compute_dtype("f32"), compute_dtype("bf16")) == (torch.float32, torch.bfloat16)


def test_an_unknown_compute_type_is_refused_by_name() -> None:
    with pytest.raises(UnknownComputeType, match=r"'f64'.*f32, bf16"):
        compute_dtype("f64")
