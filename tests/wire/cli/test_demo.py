"""The demo against fake nodes; tests/test_demo.py runs it for real."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main
from muser_wire.cli.demo import PROMPT, QUESTION

FaultPicker = Callable[[str], None]


@pytest.fixture
def model(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A checkpoint that opens; temporary folders go where the test sees what is left in them."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return str(tiny_llama)


def run_demo(model: str, *options: str) -> int:
    return main(["demo", "--model", model, "--max-tokens", "7", "--start-timeout", "20", *options])


def test_the_demo_shows_both_answers_and_leaves_nothing(
    fake_nodes: FaultPicker, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(model) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n  The reader reads.\n") == 2
    assert "route                     remote                local" in printed
    assert "The decode node says why it worked alone: producer unreachable" in printed
    assert "The two answers are equal" in printed
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("texts-differ", "the two answers differ"),
        ("never-remote", "the first answer's route was local, not remote: producer unreachable"),
        ("decode-ends-in-the-middle", "the decode node gave no answer"),
        ("prefill-ends", "the prefill node ended with exit code 7"),
        ("decode-ends", "the decode node ended with exit code 7"),
    ],
)
def test_what_must_not_be_ends_the_demo_with_a_failure(
    fault: str, message: str, fake_nodes: FaultPicker, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nodes(fault)
    assert run_demo(model) == 1
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path / "temporary") == []


def test_a_failing_node_s_log_is_shown_and_named(
    fake_nodes: FaultPicker, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nodes("decode-ends")
    run_demo(model)
    printed = capsys.readouterr().err
    assert "end of the decode node's log" in printed
    assert "line 99" in printed
    assert "line 59" not in printed


def test_an_unknown_model_is_named_before_a_node_starts(
    fake_nodes: FaultPicker, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("no-such-model") == 1
    assert "no-such-model is neither a path that exists" in capsys.readouterr().err


def test_the_prompt_ends_with_the_question_that_is_shown() -> None:
    assert PROMPT.endswith(QUESTION)
