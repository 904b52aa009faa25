from __future__ import annotations

import itertools

import pytest

from muser_decode.engine.pace import Pace


def cuts(pace: Pace, start: int, stop: int, *, shared: bool) -> list[int]:
    stops = []
    while start < stop:
        start = pace.unit_stop(start, stop, shared=shared)
        stops.append(start)
    return stops


def taught(token_s: float) -> Pace:
    pace = Pace()
    pace.learn(1_000, 1_000 * token_s)
    return pace


def test_before_any_measurement_a_unit_is_the_least() -> None:
    assert Pace().unit_stop(0, 2_048, shared=False) == Pace().unit_stop(0, 2_048, shared=True) == 128


@pytest.mark.parametrize(
    ("token_s", "shared", "alone"),
    [(0.01, 128, 128), (0.0005, 128, 1_024), (0.0003, 256, 2_048), (0.0001, 512, 2_048), (1e-9, 2_048, 2_048)],
)
def test_units_take_a_tenth_of_a_second_in_company_and_one_alone(token_s: float, shared: int, alone: int) -> None:
    pace = taught(token_s)
    assert pace.unit_stop(0, 2_048, shared=True) == shared
    assert pace.unit_stop(0, 2_048, shared=False) == alone


def test_units_end_on_multiples_or_with_their_chunk() -> None:
    pace = taught(0.01)
    assert cuts(pace, 0, 500, shared=True) == [128, 256, 384, 500]
    assert cuts(pace, 2_048, 2_400, shared=True) == [2_176, 2_304, 2_400]
    assert cuts(pace, 1_000, 1_300, shared=True) == [1_024, 1_152, 1_300]
    assert cuts(pace, 0, 16, shared=True) == [16]


def test_what_is_left_is_never_a_handful() -> None:
    """A few rows would be multiplied by another kernel, whose sums have another order."""
    for pace, tokens in itertools.product((taught(0.01), taught(0.0003)), range(65, 700)):
        stops = [0, *cuts(pace, 0, tokens, shared=True)]
        assert stops[-1] == tokens
        assert all(after - before > 64 for before, after in itertools.pairwise(stops))


def test_a_measurement_counts_half() -> None:
    pace = taught(0.01)
    pace.learn(100, 0.0)
    pace.learn(100, 0.0)
    # 0.01, 0.005, 0.0025 seconds a token: 1 s is 400 tokens, 2 times 128 and not 4 times.
    assert pace.unit_stop(0, 2_048, shared=False) == 256
