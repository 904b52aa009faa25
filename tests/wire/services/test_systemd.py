from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from muser_wire.services.errors import ServiceError
from muser_wire.services.program import Program
from muser_wire.services.systemd import UNIT, Systemd, UnitOptions, quoted, render

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here: apt-get install systemd"
)
MOST_EXPOSURE = 3.0


def unit(user: str | None = None, home: str = "/var/lib/muser", version: int = 0, **more: object) -> str:
    program = Program("prefill", Path(home), None, 30.0)
    readable = [Path("/opt/muser"), Path("/home/anna/.venv"), Path("/home/anna/.muser/models/m.gguf")]
    return render(UnitOptions(program, user, readable, version=version, **more))  # type: ignore[arg-type]


def values(text: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", text, flags=re.MULTILINE)


def sections(text: str) -> dict[str, set[str]]:
    """The names of each section, read by a parser that knows nothing of systemd."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return {name: set(parser[name]) for name in parser.sections()}


@pytest.fixture
def local_version() -> int:
    return Systemd().version()


@needs_systemd
@pytest.mark.parametrize(("user", "home"), [(None, "/var/lib/muser"), ("root", "/root/.muser"), ("root", "/srv/my m%")])
def test_systemd_finds_nothing_wrong_with_the_unit(
    user: str | None, home: str, tmp_path: Path, local_version: int
) -> None:
    path = tmp_path / UNIT
    path.write_text(unit(user, home, local_version))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_does_find_what_is_wrong(tmp_path: Path) -> None:
    """So that the test above can fail."""
    path = tmp_path / UNIT
    path.write_text(unit().replace("Type=notify", "Type=notfy").replace("UMask=0077", "UMsk=0077"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert "notfy" in done.stderr
    assert "UMsk" in done.stderr


@needs_systemd
@pytest.mark.parametrize(("user", "home"), [(None, "/var/lib/muser"), ("root", "/root/.muser")])
def test_the_exposure_is_low(user: str | None, home: str, tmp_path: Path, local_version: int) -> None:
    path = tmp_path / UNIT
    path.write_text(unit(user, home, local_version))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) < MOST_EXPOSURE


def test_the_node_says_when_it_is_ready_and_is_watched_and_started_again() -> None:
    text = unit()
    assert values(text, "Type") == ["notify"]
    assert values(text, "NotifyAccess") == ["main"]
    # Above the 60 s that a slow reader may hold the computation up.
    assert int(values(text, "WatchdogSec")[0]) > 60
    assert values(text, "Restart") == ["on-failure"]
    assert int(values(text, "TimeoutStopSec")[0]) > 30
    assert values(text, "ExecReload") == ["/bin/kill -HUP $MAINPID"]
    names = sections(text)
    assert {"StartLimitIntervalSec", "StartLimitBurst"} <= names["Unit"], "systemd ignores them elsewhere"
    # The limit must be reachable at the pace of restarts, or a broken node starts for ever.
    assert int(values(text, "StartLimitBurst")[0]) * int(values(text, "RestartSec")[0]) < 900


def test_waits_grow_where_systemd_can() -> None:
    assert values(unit(version=252), "RestartSteps") == []
    text = unit(version=255)
    assert values(text, "RestartSteps") == ["5"]
    assert int(values(text, "RestartMaxDelaySec")[0]) > int(values(text, "RestartSec")[0])


def test_the_gpu_is_reachable_and_memory_may_be_locked() -> None:
    text = unit()
    assert values(text, "PrivateDevices") == []
    assert values(text, "ProcSubset") == [], "/proc/driver/nvidia must be there"
    assert values(text, "MemoryDenyWriteExecute") == [], "compiled kernels are written, then run"
    assert values(text, "DevicePolicy") == ["closed"]
    allowed = values(text, "DeviceAllow")
    assert {"char-nvidia* rw", "/dev/nvidiactl rw", "/dev/nvidia0 rw", "/dev/nvidia-uvm rw"} <= set(allowed)
    assert values(text, "LimitMEMLOCK") == ["infinity"]
    assert values(text, "MemoryMax") == ["90%"]
    assert values(unit(memory_max="100G"), "MemoryMax") == ["100G"]


def test_without_a_user_systemd_makes_one_and_a_folder() -> None:
    text = unit()
    assert values(text, "DynamicUser") == ["yes"]
    assert values(text, "StateDirectory") == ["muser"]
    assert "MUSER_HOME=/var/lib/muser" in values(text, "Environment")
    assert values(text, "ProtectHome") == ["tmpfs"]
    # What it needs of a home is there to read; what lies elsewhere needs no line.
    assert values(text, "BindReadOnlyPaths") == ["/home/anna/.venv", "/home/anna/.muser/models/m.gguf"]


def test_with_a_user_his_folder_is_all_of_his_home_that_is_seen() -> None:
    text = unit("anna", "/home/anna/.muser")
    assert values(text, "User") == ["anna"]
    assert values(text, "DynamicUser") == []
    assert values(text, "ProtectHome") == ["tmpfs"]
    assert values(text, "BindPaths") == ["/home/anna/.muser"]
    assert values(text, "BindReadOnlyPaths") == ["/home/anna/.venv"]
    elsewhere = unit("anna", "/srv/muser")
    assert values(elsewhere, "ReadWritePaths") == ["/srv/muser"]


@pytest.mark.parametrize(
    ("text", "doubled", "written"),
    [("/a/b", "", "/a/b"), ("/a b", "", '"/a b"'), ("50%", "", "50%%"), ("$x", "$", "$$x"), ('a"\\', "", '"a\\"\\\\"')],
)
def test_words_are_quoted_as_unit_files_want_them(text: str, doubled: str, written: str) -> None:
    assert quoted(text, doubled) == written


def test_a_line_break_in_a_path_is_refused() -> None:
    with pytest.raises(ServiceError, match="cannot stand in a unit file"):
        unit("anna", "/home/a\nExecStartPre=/bin/evil")


class Tool:
    """Notes the commands; the real systemctl cannot talk to a system that was not booted with systemd."""

    def __init__(self, fails: str = "") -> None:
        self.commands: list[str] = []
        self.fails = fails

    def __call__(self, command: list[str]) -> str:
        self.commands.append(" ".join(command))
        if self.fails and self.fails in self.commands[-1]:
            raise ServiceError(f"{self.commands[-1]} failed")
        return ""


class Booted(Systemd):
    """The machine's own systemd, its unit in another folder."""

    def _runs(self) -> bool:
        return True


def test_install_enables_and_starts_and_the_second_time_only_sees_to_that(tmp_path: Path) -> None:
    tool = Tool()
    systemd = Booted(tmp_path, tool)
    assert systemd.install("unit", replace=False)
    steps = ["systemctl daemon-reload", f"systemctl enable {UNIT}", f"systemctl restart {UNIT}"]
    assert tool.commands == steps
    assert not systemd.install("unit", replace=False)
    assert f"systemctl restart {UNIT}" not in tool.commands[3:], "a node that serves is left alone"
    with pytest.raises(ServiceError, match="differs"):
        systemd.install("another unit", replace=False)
    assert systemd.unit_file.read_text() == "unit"
    assert systemd.install("another unit", replace=True)


def test_an_install_that_fails_leaves_no_unit_behind(tmp_path: Path) -> None:
    systemd = Booted(tmp_path, Tool(fails="enable"))
    with pytest.raises(ServiceError):
        systemd.install("unit", replace=False)
    assert not systemd.unit_file.exists()


def test_a_first_install_whose_node_does_not_start_is_taken_back_whole(tmp_path: Path) -> None:
    """Else systemd would go on starting it, and a link to a unit that is gone would be left."""
    tool = Tool(fails="restart")
    systemd = Booted(tmp_path, tool)
    with pytest.raises(ServiceError, match="restart"):
        systemd.install("unit", replace=False)
    assert tool.commands[3:] == [f"systemctl disable --now {UNIT}", "systemctl daemon-reload"]
    assert not systemd.unit_file.exists()
    tool.fails = ""
    systemd.install("unit", replace=False)
    tool.fails = "restart"
    tool.commands.clear()
    with pytest.raises(ServiceError, match="restart"):
        systemd.install("another unit", replace=True)
    assert systemd.unit_file.exists(), "one that ran before is not removed"
    assert not any("disable" in command for command in tool.commands)


def test_uninstall_stops_and_removes_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    tool = Tool()
    systemd = Booted(tmp_path, tool)
    systemd.install("unit", replace=False)
    tool.commands.clear()
    systemd.uninstall()
    assert tool.commands == [f"systemctl disable --now {UNIT}", "systemctl daemon-reload"]
    assert not systemd.unit_file.exists()
    with pytest.raises(ServiceError, match=rf"{re.escape(UNIT)} is not there: nothing to uninstall"):
        systemd.uninstall()


@needs_systemd
def test_the_real_systemctl_enables_the_unit_in_a_system_that_does_not_run(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    assert systemd.install(unit(), replace=False)
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants" / UNIT
    assert wanted.is_symlink()
    assert not systemd.install(unit(), replace=False)
    systemd.uninstall()
    assert not wanted.is_symlink()
    assert not systemd.unit_file.exists()
