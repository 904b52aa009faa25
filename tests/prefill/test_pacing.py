from __future__ import annotations

from muser_prefill.pacing import CREDIT_S, Pacer


def test_no_rate_never_waits() -> None:
    pacer = Pacer(0)
    assert [pacer.delay_s(1 << 30, now) for now in (0.0, 0.0)] == [0.0, 0.0]


def test_a_steady_sender_leaves_at_the_rate() -> None:
    pacer, now = Pacer(1000.0), 100.0
    for _ in range(50):
        now += pacer.delay_s(100, now)
    # 50 frames of 0.1 s: the first leaves at once, and the credit lets one be a little early.
    assert abs(now - 100.0 - 4.9) <= CREDIT_S + 1e-9


def test_idle_time_is_not_saved_up_beyond_the_credit() -> None:
    pacer = Pacer(1000.0)
    pacer.delay_s(100, 0.0)
    assert pacer.delay_s(100, 50.0) == 0.0
    assert abs(pacer.delay_s(100, 50.0) - (0.1 - CREDIT_S)) < 1e-9
