from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import reference
from bench.driver import BenchError, Samples

PLANES = np.random.default_rng(0).normal(size=(2, 5, 2, 8)).astype(np.float32)


class FakePeer:
    """Answers with a prepared array."""

    def __init__(self, planes: np.ndarray) -> None:
        self._planes = planes

    def call(self, op: str, ids: list[int], out: str) -> dict[str, object]:
        assert op == "planes"
        np.save(out, self._planes)
        return {}


def test_lanes_that_compute_the_same_model_pass(tmp_path: Path) -> None:
    found = reference._distance([FakePeer(PLANES * 1.03125), FakePeer(PLANES)], [1, 2], tmp_path)
    assert found == pytest.approx(0.03125)


@pytest.mark.parametrize("other", [PLANES[:, ::-1], PLANES * np.float32("nan")])
def test_lanes_that_do_not_are_refused(other: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="last planes differ"):
        reference._distance([FakePeer(PLANES), FakePeer(np.ascontiguousarray(other))], [1, 2], tmp_path)


def options(*flags: str, tmp_path: Path) -> reference.Options:
    return reference.Options.parse(["--model", str(tmp_path), *flags])


def test_goals_are_about_512_tokens(tmp_path: Path) -> None:
    case = Samples({reference.REFERENCE: (2.0, 2.0), reference.NATIVE: (1.5, 1.5), reference.LLAMACPP: (3.0, 5.0)})
    goals = reference._prefill_goals({128: case, 512: case}, options(tmp_path=tmp_path))
    assert [(goal.least, goal.measured, goal.met) for goal in goals] == [(0.5, 0.75, True), (1.0, 2.0, True)]
    assert reference._prefill_goals({128: case}, options(tmp_path=tmp_path)) == []


def test_llamacpp_that_could_not_be_measured_is_a_miss_unless_left_out(tmp_path: Path) -> None:
    case = Samples({reference.REFERENCE: (2.0,), reference.NATIVE: (0.5,)})
    goals = reference._prefill_goals({512: case}, options(tmp_path=tmp_path))
    assert [goal.met for goal in goals] == [False, False]
    left_out = reference._prefill_goals({512: case}, options("--no-llamacpp", tmp_path=tmp_path))
    assert [goal.measured for goal in left_out] == [0.25]


def test_either_half_may_be_left_out(tmp_path: Path) -> None:
    found = options("--tokens", "none", "--decoded", "0", tmp_path=tmp_path)
    assert (found.tokens, found.decoded) == ((), 0)
    assert reference.run(found) == []
