from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from muser_wire.services.errors import ServiceError
from muser_wire.services.program import Program, installation, publish, remove, run_tool


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


def test_who_ends_a_command_ends_the_tool_that_it_runs() -> None:
    script = "from muser_wire.services.program import hand_over; hand_over(['sh', '-c', 'echo $$; exec sleep 60'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        tool = int(command.stdout.readline())
        os.kill(tool, 0)
        command.terminate()
        assert command.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(tool, 0)
