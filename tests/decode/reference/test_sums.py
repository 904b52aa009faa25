from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference import sums
from muser_decode.reference.sums import added_one_by_one, library_adds_in_order, ordered_sum


def ascending(x: np.ndarray, axis: int) -> np.ndarray:
    total = np.float32(0)
    for term in np.moveaxis(x, axis, 0):
        total = total + term
    return np.expand_dims(total, axis)


def terms(shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((18, 15, 1, 64), 0),
        ((48, 9, 64, 64), 0),
        ((3, 1, 3, 65), 1),
        ((3, 33, 96, 129), 1),
        ((5, 9, 64), 1),
        ((1, 64), 0),
    ],
)
@pytest.mark.parametrize("way", [ordered_sum, added_one_by_one])
def test_terms_are_added_ascending(shape: tuple[int, ...], axis: int, way: object) -> None:
    x = terms(shape, axis)
    assert callable(way)
    np.testing.assert_array_equal(np.array(way(mx.array(x), axis)), ascending(x, axis))


def test_another_order_is_noticed_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that adds from the other end is found out by trying, and sums are then written out."""
    true_sum = mx.sum

    def descending(x: mx.array, axis: int, keepdims: bool = False) -> mx.array:
        return true_sum(mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis=axis), axis=axis, keepdims=keepdims)

    library_adds_in_order.cache_clear()
    monkeypatch.setattr(sums.mx, "sum", descending)
    try:
        assert not library_adds_in_order()
        x = terms((31, 64), 7)
        np.testing.assert_array_equal(np.array(ordered_sum(mx.array(x), 0)), ascending(x, 0))
    finally:
        library_adds_in_order.cache_clear()


def test_another_order_of_many_terms_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes long sums in two halves, as GPUs do."""
    true_sum = mx.sum

    def halved(x: mx.array, axis: int, keepdims: bool = False) -> mx.array:
        if x.shape[axis] < 64:
            return true_sum(x, axis=axis, keepdims=keepdims)
        return sum(true_sum(half, axis=axis, keepdims=keepdims) for half in mx.split(x, [x.shape[axis] // 2], axis))

    library_adds_in_order.cache_clear()
    monkeypatch.setattr(sums.mx, "sum", halved)
    try:
        assert not library_adds_in_order()
    finally:
        library_adds_in_order.cache_clear()
