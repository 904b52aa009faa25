"""How distances are taken, and that every pinned text is long enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy import F32, TOKENS, Distance, goals, texts
from muser_wire.model.tokenizer import load_tokenizer


def test_a_distance_is_that_of_distributions() -> None:
    other = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32))
    ours = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32)) + np.float32(3)
    got = Distance.between(ours, other)
    assert got.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert got.top1_differs == 0.5
    assert got.logit == pytest.approx(3 + np.log(2), rel=1e-5)
    assert Distance.mean([got, Distance(got.kl * 3, 0.0, 9.0)]) == Distance(pytest.approx(got.kl * 2), 0.25, 9.0)


def test_goals_are_missed_just_above_the_budgets() -> None:
    good, bad = Distance(0.99e-4, 0.0049, 0.1), Distance(1.01e-4, 0.0051, 0.1)
    assert [goal.met for goal in goals({"m": {F32: good}})] == [True, True]
    assert [goal.met for goal in goals({"m": {F32: bad}})] == [False, False]


def test_texts_are_long_enough(smollm2: Path) -> None:
    found = texts(load_tokenizer(smollm2))
    assert sorted(found) == ["code", "dialogue", "manual", "prose"]
    assert {len(ids) for ids in found.values()} == {TOKENS}
