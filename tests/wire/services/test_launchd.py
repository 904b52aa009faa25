from __future__ import annotations

import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest

from muser_wire.services.errors import ServiceError
from muser_wire.services.launchd import LABEL, Launchd, render
from muser_wire.services.program import Program


def is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def is_string_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)


def is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_limits(value: Any) -> bool:
    known = {"Core", "CPU", "Data", "FileSize", "MemoryLock", "NumberOfFiles", "NumberOfProcesses", "ResidentSetSize"}
    return isinstance(value, dict) and set(value) <= known | {"Stack"} and all(map(is_number, value.values()))


def is_keep_alive(value: Any) -> bool:
    """A boolean, or conditions: those of the manual that are booleans, and those that are tables of booleans."""
    booleans, tables = {"SuccessfulExit", "NetworkState", "Crashed"}, {"PathState", "OtherJobEnabled"}
    if type(value) is bool:
        return True
    return isinstance(value, dict) and all(
        (name in booleans and type(item) is bool) or (name in tables and isinstance(item, dict))
        for name, item in value.items()
    )


# The keys of launchd.plist(5) that a node may use, and what each takes.
MANUAL = {
    "Label": lambda value: isinstance(value, str) and bool(value),
    "ProgramArguments": is_strings,
    "EnvironmentVariables": is_string_table,
    "WorkingDirectory": lambda value: isinstance(value, str),
    "RunAtLoad": lambda value: type(value) is bool,
    "KeepAlive": is_keep_alive,
    "ThrottleInterval": is_number,
    "ExitTimeOut": is_number,
    "ProcessType": lambda value: value in {"Background", "Standard", "Adaptive", "Interactive"},
    "StandardOutPath": lambda value: isinstance(value, str),
    "StandardErrorPath": lambda value: isinstance(value, str),
    "SoftResourceLimits": is_limits,
    "HardResourceLimits": is_limits,
    "Umask": lambda value: is_number(value) or isinstance(value, str),
}


def agent(drain_s: float = 30.0, config: Path | None = None) -> dict[str, Any]:
    program = Program("decode", Path("/Users/ä & b/.muser"), config, drain_s)
    return dict(plistlib.loads(render(program, Path("/Users/ä & b")).encode()))


def test_every_key_is_one_of_the_manual_s_and_has_its_type() -> None:
    for name, value in agent().items():
        assert name in MANUAL, f"{name} is no key of launchd.plist(5)"
        assert MANUAL[name](value), f"{name} does not take {value!r}"


def test_the_check_above_sees_wrong_keys_and_types() -> None:
    assert not MANUAL["KeepAlive"]({"SuccesfulExit": False})
    assert not MANUAL["ThrottleInterval"]("30")
    assert not MANUAL["ThrottleInterval"](True)
    assert not MANUAL["ProgramArguments"]("muser-decode serve")
    assert not MANUAL["EnvironmentVariables"]({"A": 1})


def test_it_is_started_again_when_it_fails_and_not_more_often_than_it_says() -> None:
    made = agent(drain_s=50.0, config=Path("/etc/d.toml"))
    assert made["Label"] == "local.muser.decode"
    assert made["KeepAlive"] == {"SuccessfulExit": False}
    assert made["RunAtLoad"] is True
    assert made["ThrottleInterval"] >= 10
    assert made["ExitTimeOut"] > 50, "launchd kills after that"
    command = [sys.executable, "-m", "muser_decode", "serve", "--config", "/etc/d.toml"]
    assert made["ProgramArguments"] == command
    assert made["EnvironmentVariables"]["MUSER_HOME"] == "/Users/ä & b/.muser"
    assert made["StandardErrorPath"] == "/Users/ä & b/Library/Logs/Muser/decode.log"
    assert made["Umask"] == 63


class Launchctl:
    """Knows which agents are loaded, as launchctl does; that one is macOS's alone.

    An agent that was told to end is still seen for `ending` more looks, as one that drains.
    """

    def __init__(self, ending: int = 0) -> None:
        self.loaded: set[str] = set()
        self.refuses = False
        self.starts = 0
        self.ending = ending
        self.left: int | None = None

    def __call__(self, command: list[str]) -> str:
        tool, step, *rest = command
        assert tool == "launchctl"
        if step == "print" and self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.loaded.remove(rest[0])
        if step == "print" and rest[0] not in self.loaded:
            raise ServiceError("Could not find service")
        if step == "bootstrap":
            if self.refuses:
                raise ServiceError("Bootstrap failed: 5: Input/output error")
            label = plistlib.loads(Path(rest[1]).read_bytes())["Label"]
            target = f"{rest[0]}/{label}"
            assert target not in self.loaded, "launchctl refuses what is loaded already"
            self.loaded.add(target)
            self.starts += 1
        if step == "bootout" and self.ending:
            self.left = self.ending
            raise ServiceError(
                "`launchctl bootout` failed with status 36: Boot-out failed: 36: Operation now in progress"
            )
        if step == "bootout":
            self.loaded.remove(rest[0])
        return ""


def text(drain_s: float = 1.0) -> str:
    return render(Program("decode", Path("/h"), None, drain_s), Path("/h"))


def test_install_loads_it_and_the_second_time_leaves_it_running(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = Launchd(tmp_path, 501, launchctl)
    assert launchd.install(text(), replace=False)
    assert launchctl.loaded == {f"gui/501/{LABEL}"}
    assert launchd.plist_file == tmp_path / "Library/LaunchAgents/local.muser.decode.plist"
    assert not launchd.install(text(), replace=False)
    assert launchctl.starts == 1
    with pytest.raises(ServiceError, match="differs"):
        launchd.install(text(2.0), replace=False)
    assert launchd.install(text(2.0), replace=True)
    assert launchctl.starts == 2


def test_a_node_that_drains_is_waited_for_before_another_one_is_loaded(tmp_path: Path) -> None:
    launchctl = Launchctl(ending=3)
    launchd = Launchd(tmp_path, 501, launchctl)
    launchd.install(text(), replace=False)
    assert launchd.install(text(2.0), replace=True)
    assert launchctl.starts == 2
    launchd.uninstall()
    assert (launchctl.loaded, launchd.plist_file.exists()) == (set(), False)


def test_a_node_that_does_not_end_is_named_and_its_agent_stays(tmp_path: Path) -> None:
    launchd = Launchd(tmp_path, 501, Launchctl(ending=10**6), unload_s=0.3)
    launchd.install(text(), replace=False)
    with pytest.raises(ServiceError, match=f"gui/501/{LABEL} has not ended within 0.3 s"):
        launchd.uninstall()
    assert launchd.plist_file.exists()


def test_an_agent_that_somebody_unloaded_is_loaded_again(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = Launchd(tmp_path, 501, launchctl)
    launchd.install(text(), replace=False)
    launchctl.loaded.clear()
    assert not launchd.install(text(), replace=False)
    assert launchctl.loaded == {f"gui/501/{LABEL}"}


def test_an_install_that_fails_leaves_no_agent_behind(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchctl.refuses = True
    launchd = Launchd(tmp_path, 501, launchctl)
    with pytest.raises(ServiceError, match="Bootstrap failed"):
        launchd.install(text(), replace=False)
    assert not launchd.plist_file.exists()


def test_uninstall_unloads_and_removes_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    launchctl = Launchctl()
    launchd = Launchd(tmp_path, 501, launchctl)
    launchd.install(text(), replace=False)
    launchd.uninstall()
    assert launchctl.loaded == set()
    with pytest.raises(ServiceError, match=r"plist is not there: nothing to uninstall"):
        launchd.uninstall()
