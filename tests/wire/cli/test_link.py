"""What numbers mean: each verdict at its border."""

from __future__ import annotations

import pytest

from muser_wire.cli.interface import Interface
from muser_wire.cli.link import (
    Verdict,
    judge_eee,
    judge_idle,
    judge_mtu,
    judge_round_trip,
    judge_route,
    judge_throughput,
)
from muser_wire.doctor.finding import Finding

GIGABIT = Interface("eth0", "10.0.0.1", mtu=1500, speed_bits=10**9, wireless=False, eee=False)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(118e6, "ok"), (100e6, "ok"), (99e6, "warn"), (63e6, "warn"), (62e6, "bad")]
)
def test_throughput_is_judged_by_the_interface_s_rate(rate: float, verdict: str) -> None:
    found = judge_throughput(int(rate * 2), 2.0, GIGABIT)
    assert found.verdict == verdict
    assert found.numbers["bytes_per_s"] == rate
    assert bool(found.advice) == (verdict != "ok")


@pytest.mark.parametrize("way", [None, Interface("lo", speed_bits=10), Interface("eth0")])
def test_throughput_without_a_known_rate_is_unknown(way: Interface | None) -> None:
    assert judge_throughput(1, 1.0, way).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [([0.0005] * 100, "ok"), ([0.003] * 100, "warn"), ([0.0005] * 98 + [0.02] * 2, "warn"), ([0.05] * 100, "bad")],
)
def test_round_trips(samples: list[float], verdict: str) -> None:
    found = judge_round_trip(samples)
    assert found.verdict == verdict
    assert found.numbers["p99_s"] == samples[99]


@pytest.mark.parametrize(
    ("after_s", "verdict"),
    [(0.01, "ok"), (0.024, "ok"), (0.026, "warn"), (0.099, "warn"), (0.101, "bad"), (2.0, "bad")],
)
def test_a_burst_after_idle_is_judged_against_one_at_once(after_s: float, verdict: str) -> None:
    found = judge_idle(0.010, after_s, 45.0)
    assert found.verdict == verdict
    assert ("Energy-Efficient" in found.advice) == (verdict != "ok")


def test_the_way() -> None:
    assert judge_route(GIGABIT).verdict is Verdict.OK
    assert judge_route(Interface("eth0", gateway="10.0.0.254")).verdict is Verdict.WARN
    assert judge_route(Interface("wlan0", wireless=True)).verdict is Verdict.WARN
    assert judge_route(None).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("mtu", "verdict"), [(9000, "ok"), (1500, "ok"), (1499, "warn"), (None, "unknown")])
def test_mtu(mtu: int | None, verdict: str) -> None:
    assert judge_mtu(Interface("eth0", mtu=mtu)).verdict == verdict


@pytest.mark.parametrize(("eee", "verdict"), [(True, "warn"), (False, "ok"), (None, "unknown")])
def test_energy_saving(eee: bool | None, verdict: str) -> None:
    found = judge_eee(Interface("enp1s0", eee=eee))
    assert found.verdict == verdict
    assert ("--set-eee enp1s0 eee off" in found.advice) == (verdict == "warn")


@pytest.mark.parametrize(
    "finding",
    [
        judge_throughput(99, 1.0, GIGABIT),
        judge_throughput(1, 1.0, None),
        judge_round_trip([0.003] * 100),
        judge_round_trip([0.05] * 100),
        judge_idle(0.010, 0.026, 45.0),
        judge_idle(0.010, 2.0, 45.0),
        judge_route(None),
        judge_route(Interface("eth0", gateway="10.0.0.254")),
        judge_route(Interface("wlan0", wireless=True)),
        judge_mtu(None),
        judge_mtu(Interface("eth0", mtu=1400)),
        judge_eee(None),
        judge_eee(Interface("eth0", eee=True)),
    ],
    ids=lambda finding: f"{finding.name}-{finding.verdict}",
)
def test_whatever_is_not_well_says_what_to_do_or_why_it_is_not_known(finding: Finding) -> None:
    assert finding.verdict is not Verdict.OK
    assert len(finding.advice) > 10
