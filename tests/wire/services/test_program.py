from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muser_wire.services.errors import ServiceError
from muser_wire.services.program import Program, hand_over, installation, publish, remove, run_tool


def test_the_command_names_this_python_and_the_file() -> None:
    assert Program("prefill", Path("/h"), None, 1.0).command == [sys.executable, "-m", "muser_prefill", "serve"]
    command = Program("decode", Path("/h"), Path("/etc/d.toml"), 1.0).command
    assert command[1:] == ["-m", "muser_decode", "serve", "--config", "/etc/d.toml"]


def test_the_installation_covers_python_and_the_source_and_nothing_twice() -> None:
    folders = installation()
    for needed in (
        Path(sys.executable).resolve(),
        Path(sys.prefix),
        Path(__file__).resolve().parents[3] / "muser_wire",
    ):
        assert any(needed.is_relative_to(folder.resolve()) for folder in folders), needed
    assert not any(a != b and a.is_relative_to(b) for a in folders for b in folders)


def test_a_file_is_written_once_and_another_only_on_purpose(tmp_path: Path) -> None:
    path = tmp_path / "a" / "unit"
    assert publish(path, "one", replace=False)
    assert not publish(path, "one", replace=False)
    with pytest.raises(ServiceError, match="is there already and differs: uninstall it first, or give --replace"):
        publish(path, "two", replace=False)
    assert path.read_text() == "one"
    assert publish(path, "two", replace=True)
    assert [file.name for file in path.parent.iterdir()] == ["unit"]
    remove(path)
    with pytest.raises(ServiceError, match="unit is not there: nothing to uninstall"):
        remove(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match=r"file/unit cannot be written: File exists"):
        publish(tmp_path / "file" / "unit", "x", replace=True)


def test_a_tool_that_fails_is_quoted_and_one_that_is_missing_is_named() -> None:
    assert run_tool(["echo", "x"]) == "x\n"
    with pytest.raises(ServiceError, match=r"`sh -c echo no >&2; exit 3` failed with status 3: no"):
        run_tool(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(ServiceError, match="muser-no-such-tool cannot be run: No such file"):
        run_tool(["muser-no-such-tool"])


def hand_over_elsewhere(*command: str) -> subprocess.Popen[str]:
    """Start a process that hands over to a tool."""
    script = f"from muser_wire.services.program import hand_over; hand_over({command!r})"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_who_ends_a_command_ends_the_tool_that_it_runs() -> None:
    with hand_over_elsewhere("sh", "-c", "echo $$; exec sleep 60") as command:
        assert command.stdout is not None
        assert int(command.stdout.readline()) == command.pid
        command.terminate()
        assert command.wait(20) == -signal.SIGTERM


def test_a_tool_s_exit_status_is_the_command_s() -> None:
    with hand_over_elsewhere("sh", "-c", "echo x; exit 3") as command:
        assert command.communicate(timeout=20) == ("x\n", None)
    assert command.returncode == 3


def test_a_tool_whose_reader_leaves_ends_quietly() -> None:
    """As after `logs | head`: Python ignores SIGPIPE, and what is ignored stays so in what it executes."""
    with hand_over_elsewhere("yes") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "y\n"
        command.stdout.close()
        assert command.wait(20) == -signal.SIGPIPE


def test_a_tool_that_is_missing_is_named_and_signals_stay_as_they_were() -> None:
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(ServiceError, match="muser-no-such-tool cannot be run: No such file"):
        hand_over(["muser-no-such-tool"])
    assert signal.getsignal(signal.SIGPIPE) == before
