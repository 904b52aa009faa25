from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muser_wire.cli import __main__ as command
from muser_wire.cli.__main__ import main


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in ("model", "demo", "serve"))


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["model"], ["model", "fetch"], ["model", "inspect", "--wrong"]]
)
def test_a_wrong_command_line_is_exit_2_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: muser" in capsys.readouterr().err


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("muser_wire.cli.model.fetched_path", interrupted)
    assert main(["model", "path", "smollm2"]) == command.EXIT_INTERRUPTED == 130
    assert capsys.readouterr().err == "muser: interrupted\n"


def run(*arguments: str, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "muser_wire.cli", *arguments], stdout=out, stderr=subprocess.PIPE, text=True
    )


def test_as_a_program_an_error_is_a_line_and_exit_2() -> None:
    with run("model", "inspect", "/nowhere") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("muser: /nowhere is neither")
    assert "Traceback" not in err


def test_a_reader_that_closes_the_pipe_is_no_error(tiny_llama: Path) -> None:
    with run("model", "inspect", str(tiny_llama)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0
