from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.errors import ModelNotSupported
from muser_decode.numerics import check_types, name_of, round_kv
from muser_wire.geometry import ElementType


def samples() -> np.ndarray:
    """Values of every exponent, both signs, with ties and their neighbours at float16 and bfloat16 precision."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 1 << 32, 20_000, dtype=np.uint32)
    ties = (random.integers(0, 1 << 19, 5_000, dtype=np.uint32) << 13) + np.uint32(1 << 12)
    bf_ties = (random.integers(0, 1 << 16, 5_000, dtype=np.uint32) << 16) + np.uint32(1 << 15)
    near = np.concatenate([ties + 1, ties - 1, bf_ties + 1, bf_ties - 1])
    values = np.concatenate([bits, ties, bf_ties, near]).view(np.float32)
    return values[np.isfinite(values)]


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, half to even, on the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def test_f16_rounds_to_nearest_even_and_clamps() -> None:
    x = samples()
    expected = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.array(round_kv(mx.array(x), ElementType.F16)), expected)


def test_f16_clamps_infinities() -> None:
    x = mx.array([np.inf, -np.inf, 65504.0, 65519.9, 65520.0, -1e30])
    assert round_kv(x, ElementType.F16).tolist() == [65504.0, -65504.0, 65504.0, 65504.0, 65504.0, -65504.0]


def test_bf16_rounds_to_nearest_even() -> None:
    x = samples()
    np.testing.assert_array_equal(np.array(round_kv(mx.array(x), ElementType.BF16)), nearest_bf16(x))


def test_rounding_keeps_the_type() -> None:
    assert round_kv(mx.array([1.0], mx.float32), ElementType.F16).dtype == mx.float32
    assert round_kv(mx.array([1.0], mx.bfloat16), ElementType.BF16).dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        (mx.float32, ElementType.F16),
        (mx.float32, ElementType.BF16),
        (mx.float16, ElementType.F16),
        (mx.bfloat16, ElementType.BF16),
    ],
)
def test_types_that_hold_the_element_exactly(dtype: mx.Dtype, element: ElementType) -> None:
    check_types(dtype, element)


@pytest.mark.parametrize(("dtype", "element"), [(mx.bfloat16, ElementType.F16), (mx.float16, ElementType.BF16)])
def test_types_that_would_round_again_are_refused(dtype: mx.Dtype, element: ElementType) -> None:
    with pytest.raises(ModelNotSupported, match=f"{element.value} cannot be kept exactly in {name_of(dtype)}"):
        check_types(dtype, element)
