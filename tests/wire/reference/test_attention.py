"""Attention beside float64's softmax, and that neither chunks nor unseen keys change a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.planes import key_integers, plane, value_integers

AR = NumpyArithmetic()
KEYS = 200


def planes(seed: int, kv_heads: int, head_dim: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    k, v = (plane(AR, rng.standard_normal((KEYS, kv_heads, head_dim)).astype(np.float32)) for _ in "kv")
    return k, v


def run(q: Any, k: Any, v: Any, first: int, window: int | None, first_key: int = 0) -> Any:
    view = View(first, first_key, window, score_scale(q.shape[-1] ** -0.5))
    return attention(AR, q, key_integers(AR, k[first_key:]), value_integers(AR, v[first_key:]), view)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "window"), [(64, 4, 2, None), (80, 2, 1, 40), (256, 2, 2, 64)]
)
def test_it_is_softmax_but_for_rounding(head_dim: int, heads: int, kv_heads: int, window: int | None) -> None:
    k, v = planes(head_dim, kv_heads, head_dim)
    q = np.random.default_rng(1).standard_normal((70, heads, head_dim)).astype(np.float32)
    got = run(q, k, v, KEYS - 70, window)
    kk, vv = (np.repeat(x.astype(np.float64), heads // kv_heads, 1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), kk) * head_dim**-0.5
    back = np.arange(KEYS - 70, KEYS)[:, None] - np.arange(KEYS)
    scores = np.where((back >= 0) & (back < (window or KEYS)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), vv)
    assert np.abs(got - wanted).max() < 2**-9 * np.abs(wanted).max()


@pytest.mark.parametrize("window", [None, 5, 64, 100])
def test_a_row_does_not_depend_on_others(window: int | None) -> None:
    k, v = planes(7, 1, 32)
    q = np.random.default_rng(2).standard_normal((120, 3, 32)).astype(np.float32)
    whole = run(q, k, v, 80, window)
    assert (run(q[-1:], k, v, KEYS - 1, window) == whole[-1:]).all()
    parts = [run(q[a:b], k[: 80 + b], v[: 80 + b], 80 + a, window) for a, b in ((0, 1), (1, 50), (50, 120))]
    assert (np.concatenate(parts) == whole).all()


def test_keys_that_a_window_has_left_behind_may_be_gone() -> None:
    k, v = planes(8, 2, 16)
    q = np.random.default_rng(3).standard_normal((9, 2, 16)).astype(np.float32)
    first = KEYS - 9
    assert (run(q, k, v, first, 30) == run(q, k, v, first, 30, first_key=first - 29)).all()


def test_far_scores_count_for_nothing_and_ties_share() -> None:
    k = np.zeros((130, 1, 32), np.float16)
    v = np.zeros((130, 1, 32), np.float16)
    v[:64] = 1
    k[64:] = 100
    v[64:] = 2
    q = np.full((1, 1, 32), 100, np.float32)
    got = run(q, k, v, 129, None)
    assert np.abs(got - 2).max() < 2**-10
    v[:64] = 1000
    assert (run(q, k, v, 129, None) == got).all()
    v[:64] = 1
    assert (run(q * 0, k, v, 129, None)[0, 0, 0]) == pytest.approx((64 + 66 * 2) / 130, rel=2**-10)
