from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.doctor.finding import Verdict
from muser_wire.doctor.service import check_agent, check_unit
from muser_wire.services.errors import ServiceError
from muser_wire.services.launchd import Launchd
from muser_wire.services.systemd import Systemd


def failing(command: object) -> str:
    raise ServiceError("it cannot be run")


def installed(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("x")


def test_nothing_is_installed(tmp_path: Path) -> None:
    for found in (check_unit(Systemd(tmp_path)), check_agent(Launchd(tmp_path))):
        assert (found.verdict, found.value) == (Verdict.OK, "not installed: the node is started by hand")


@pytest.mark.parametrize(
    ("state", "more", "verdict"),
    [
        ("active", "running", Verdict.OK),
        ("reloading", "reload", Verdict.OK),
        ("activating", "start", Verdict.WARN),
        ("activating", "auto-restart", Verdict.BAD),
        ("failed", "failed", Verdict.BAD),
    ],
)
def test_a_unit(state: str, more: str, verdict: Verdict, tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)
    installed(systemd.unit_file)
    found = check_unit(systemd, lambda _: f"ActiveState={state}\nSubState={more}\nNRestarts=3\n")
    assert (found.verdict, found.value) == (verdict, f"{state} ({more}), 3 restarts")
    assert bool(found.advice) is (verdict is not Verdict.OK)
    assert check_unit(systemd, failing).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("state", "verdict"), [("running", Verdict.OK), ("waiting", Verdict.BAD)])
def test_an_agent(state: str, verdict: Verdict, tmp_path: Path) -> None:
    launchd = Launchd(tmp_path)
    installed(launchd.plist_file)
    found = check_agent(launchd, lambda _: f"gui/501/x = {{\n\tpid = 4\n\tstate = {state}\n}}\n")
    assert (found.verdict, found.value) == (verdict, state)
    assert check_agent(launchd, failing).verdict is Verdict.BAD
