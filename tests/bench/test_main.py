from __future__ import annotations

import pytest

from bench import __main__ as bench
from bench import decode, prefill


def test_everything_runs_both_models_of_prefill_and_counts_operations() -> None:
    runs = bench.every_run()
    assert {name for name, _ in runs} == set(bench.BENCHMARKS)
    assert [flags for name, flags in runs if name == "prefill"] == [[], ["--model", "gemma3-270m"]]
    assert ("decode", ["--count", "muse-glimmer"]) in runs
    for name, flags in runs:
        if name == "prefill":
            prefill.Options.parse(flags)
        if name == "decode":
            decode.Options.parse(flags)


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["nothing"]) == 2
    assert "no benchmark is named 'nothing'; known: prefill, decode" in capsys.readouterr().err


def test_a_missed_goal_is_told_by_its_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(prefill, "main", lambda flags: asked.append(flags) or 1)
    assert bench.main(["prefill", "--rounds", "3"]) == 1
    assert asked == [["--rounds", "3"]]
    assert capsys.readouterr().err == "missed: prefill --rounds 3\n"
