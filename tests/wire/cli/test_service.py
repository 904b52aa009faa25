"""The commands as a person types them; `--root` lets the real systemctl work on a system that does not run."""

from __future__ import annotations

import getpass
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muser_decode.__main__ import main as decode
from muser_prefill.__main__ import main as prefill

needs_systemctl = pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemctl is not here")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("MUSER_HOME", str(home))
    monkeypatch.setenv("HOME", str(tmp_path))
    return home


def configure(path: Path, text: str = "model.model = '/models/m.gguf'\n") -> Path:
    path.write_text(text)
    return path


def test_a_dry_run_prints_the_unit_and_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(home / "p.toml", "model.model = '/models/m.gguf'\nprocess.drain_s = 75\n")
    root = tmp_path / "root"
    assert prefill(["service", "install", "--config", str(config), "--root", str(root), "--dry-run"]) == 0
    out = capsys.readouterr()
    assert "[Service]" in out.out
    assert f"--config {config}" in out.out
    assert "TimeoutStopSec=90" in out.out
    assert f"this would be written to {root}/etc/systemd/system/muser-prefill.service" in out.err
    assert not root.exists()


@needs_systemctl
def test_installed_twice_and_uninstalled_twice(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(home / "p.toml")
    root = ["--root", str(tmp_path / "root")]
    install = ["service", "install", "--config", str(config), *root]
    assert prefill(install) == 0
    assert "installed " in capsys.readouterr().out
    assert prefill(install) == 0
    assert "is installed already, as it would be written now" in capsys.readouterr().out
    assert prefill([*install, "--memory-max", "50%"]) == 2
    assert "is there already and differs" in capsys.readouterr().err
    assert prefill([*install, "--memory-max", "50%", "--replace"]) == 0
    assert prefill(["service", "uninstall", *root]) == 0
    assert prefill(["service", "uninstall", *root]) == 2
    assert "nothing to uninstall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--model is needed"),
        ("config_version = 7\n", "config_version is 7"),
        ("model.model = '/m'\nnetwork.prot = 1\n", "unknown key network.prot"),
    ],
)
def test_a_configuration_that_cannot_work_is_not_installed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    config = configure(home / "p.toml", text)
    install = ["service", "install", "--config", str(config), "--root", str(tmp_path / "root")]
    assert prefill(install) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_this_shell_s_variables_are_not_the_service_s(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSER_PREFILL_MODEL", "/m")
    config = configure(home / "p.toml", "")
    assert prefill(["service", "install", "--config", str(config), "--root", str(tmp_path / "root")]) == 2
    printed = capsys.readouterr().err
    assert "--model is needed" in printed
    assert f"(a service reads {config} alone)" in printed


def test_a_user_s_own_folder_is_the_service_s(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(home / "prefill.toml")
    user = getpass.getuser()
    assert prefill(["service", "install", "--user", user, "--home", str(home), "--dry-run"]) == 0
    unit = capsys.readouterr().out
    assert f"User={user}" in unit
    assert f"MUSER_HOME={home}" in unit


def test_a_user_s_folder_that_is_not_there_is_named_before_anything_is_written(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, none = configure(home / "p.toml"), tmp_path / "none"
    root = tmp_path / "root"
    flags = ["--user", getpass.getuser(), "--home", str(none), "--config", str(config), "--root", str(root)]
    assert prefill(["service", "install", *flags]) == 2
    assert f"{none} is not there: make it as {getpass.getuser()}" in capsys.readouterr().err
    assert not root.exists()


def test_users_and_folders_that_do_not_fit_are_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill(["service", "install", "--user", "nobody-of-that-name", "--dry-run"]) == 2
    assert "this machine has no such user" in capsys.readouterr().err
    assert prefill(["service", "install", "--home", "/x", "--dry-run"]) == 2
    assert "--home needs --user" in capsys.readouterr().err


def test_an_agent_is_printed_and_nothing_that_is_not_installed_is_shown_or_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home / "decode.toml")
    assert decode(["service", "install", "--dry-run"]) == 0
    agent = plistlib.loads(capsys.readouterr().out.encode())
    assert agent["EnvironmentVariables"]["MUSER_HOME"] == str(home)
    for step in ("status", "logs"):
        assert decode(["service", step]) == 2
        assert "not installed" in capsys.readouterr().err
    assert decode(["service", "uninstall"]) == 2
    assert "nothing to uninstall" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchctl is here: this would install an agent")
def test_without_launchctl_nothing_is_left_behind(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home / "decode.toml")
    assert decode(["service", "install"]) == 2
    assert "launchctl cannot be run" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.plist"))


@pytest.mark.skipif(shutil.which("launchctl") is not None, reason="launchctl is here: this would install an agent")
def test_the_agent_s_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launchd starts nothing whose working directory is not there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    config = configure(tmp_path / "d.toml")
    assert decode(["service", "install", "--config", str(config)]) == 2
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_a_decode_node_that_would_be_open_to_others_is_not_installed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(home / "decode.toml", "model.model = '/m'\nnetwork.host = '0.0.0.0'\n")
    assert decode(["service", "install"]) == 2
    assert "--host 0.0.0.0 is not a loopback address: it needs --api-key-file" in capsys.readouterr().err


def test_the_log_of_an_agent_is_shown(home: Path, tmp_path: Path) -> None:
    agents, logs = tmp_path / "Library/LaunchAgents", tmp_path / "Library/Logs/Muser"
    agents.mkdir(parents=True)
    logs.mkdir(parents=True)
    (agents / "local.muser.decode.plist").touch()
    (logs / "decode.log").write_text("one\ntwo\nthree\n")
    # In a process of its own, for that becomes `tail`.
    command = [sys.executable, "-m", "muser_decode", "service", "logs", "--lines", "2"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "two\nthree\n"
