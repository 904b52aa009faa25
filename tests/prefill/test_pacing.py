"""Frames leave no faster than they may, and no slower than they must."""

from __future__ import annotations

import pytest

from muser_prefill.pacing import CREDIT_S, Pacer


def departures(pacer: Pacer, arrivals: list[float], nbytes: int) -> list[float]:
    """When frames leave that become ready at these times; a sender waits for one frame before it makes the next."""
    now_s, left = 0.0, []
    for ready_s in arrivals:
        now_s = max(now_s, ready_s)
        now_s += pacer.delay_s(nbytes, now_s)
        left.append(now_s)
    return left


def test_without_a_rate_nothing_waits() -> None:
    pacer = Pacer(max_rate=0.0)
    assert departures(pacer, [0.0] * 5, 1 << 20) == [0.0] * 5


def test_a_steady_sender_gets_exactly_the_rate() -> None:
    left = departures(Pacer(max_rate=1e6), [1.0] * 101, 10_000)
    assert left == pytest.approx([1.0 + 0.01 * index for index in range(101)])


def test_a_large_frame_makes_the_next_one_wait_for_all_of_it() -> None:
    pacer = Pacer(max_rate=1000.0)
    assert pacer.delay_s(5000, now_s=10.0) == 0.0
    assert pacer.delay_s(1, now_s=10.0) == pytest.approx(5.0)


def test_a_sender_that_is_a_little_late_catches_up() -> None:
    pacer = Pacer(max_rate=1000.0)
    assert pacer.delay_s(100, now_s=5.0) == 0.0
    assert pacer.delay_s(100, now_s=5.1 + CREDIT_S / 2) == 0.0
    assert 5.1 + CREDIT_S / 2 + pacer.delay_s(100, now_s=5.1 + CREDIT_S / 2) == pytest.approx(5.2)


def test_a_pause_is_not_made_up_for() -> None:
    pacer = Pacer(max_rate=1000.0)
    pacer.delay_s(100, now_s=5.0)
    assert [pacer.delay_s(100, now_s=60.0) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])


def test_no_window_of_time_carries_more_than_the_rate_and_the_credit() -> None:
    pacer = Pacer(max_rate=1e6)
    arrivals = [index * 0.0105 + (0.015 if index % 7 == 0 else 0.0) for index in range(200)]
    left = departures(pacer, arrivals, 10_000)
    for first in range(0, 200, 13):
        for last in range(first, 200, 17):
            carried_s = (last - first) * 0.01
            assert carried_s <= left[last] - left[first] + CREDIT_S + 1e-9
