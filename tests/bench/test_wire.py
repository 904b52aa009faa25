"""The benchmark of the wire, on a few bytes: who moves them, what is believed, what the table says."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import wire
from bench.driver import BenchError


class Side:
    """Answers as one side of a contestant."""

    def __init__(self, **answers: dict[str, object]) -> None:
        self.answers = answers

    def call(self, op: str, **fields: object) -> dict[str, object]:
        return self.answers[op]


def contestant(name: str, seconds: float, digest: str = "same") -> wire.Contestant:
    source = Side(cpu={"cpu_s": 1.0}, digest={"digest": "same"})
    sink = Side(pull={"nbytes": 1000, "seconds": seconds, "cpu_s": 0.5}, check={"digest": digest})
    return wire.Contestant(name, source, sink)  # type: ignore[arg-type]


def test_other_bytes_are_not_believed() -> None:
    contestant(wire.RAW, 1.0).check()
    with pytest.raises(BenchError, match="other bytes"):
        contestant(wire.RAW, 1.0, digest="other").check()


def test_a_short_transfer_is_not_believed() -> None:
    with pytest.raises(BenchError, match="moved 1000 of 1001"):
        contestant(wire.RAW, 1.0).move(1001, 1001)


def test_the_table_has_rates_ratios_and_processor_time_a_gigabyte() -> None:
    raw, ours = contestant(wire.RAW, 1e-6), contestant(wire.OURS, 4e-6)
    for one in (raw, ours):
        one.move(1000, 1000)
    line = wire.report([raw, ours], 1000).splitlines()[-1].split()
    assert line == ["muser", "0.25", "0.25", "0.00", "500000.00"]


@pytest.mark.parametrize(("seconds", "of_raw", "met"), [(8e-7, 0.5, True), (9e-7, 0.5, False), (8e-7, 0.39, False)])
def test_the_goal_is_a_rate_and_a_ratio(seconds: float, of_raw: float, met: bool) -> None:
    ours = contestant(wire.OURS, seconds)
    ours.move(1000, 1000)
    assert wire.goal_met([ours], 1000, of_raw) is met


def test_a_peer_that_cannot_start_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(venv: Path, requirements: tuple[str, ...]) -> Path:
        raise wire.PeerUnavailable(f"pip could not install {requirements[0]}")

    monkeypatch.setattr(wire, "peer_python", failing)
    monkeypatch.setattr(wire, "start", lambda name, python, stack: contestant(name, 1.0))
    with ExitStack() as stack:
        found, missing = wire.start_all(argparse.Namespace(peers=True, venv=tmp_path), stack)
    assert [one.name for one in found] == [wire.RAW, wire.OURS]
    assert set(missing) == {wire.MOONCAKE, wire.NIXL}
    assert "mooncake" in missing[wire.MOONCAKE]


def test_a_real_run_moves_authenticated_handoffs_beside_tcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "wire.json"
    assert wire.main(["--sizes", "1000000", "--rounds", "1", "--no-peers", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert set(result["samples"]) == {"raw TCP", "muser"}
    # 53,248 bytes a token: 19 tokens are nearest to a megabyte.
    assert result["samples"]["muser"]["1000000"][0]["nbytes"] == 19 * 53_248
    assert "of raw" in capsys.readouterr().out
