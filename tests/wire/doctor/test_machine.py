from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from muser_wire.doctor import machine
from muser_wire.doctor.finding import Verdict


def test_this_environment_has_both_nodes_and_a_python_that_does() -> None:
    assert machine.installed_nodes() == ["prefill", "decode"]
    assert machine.check_python().verdict is Verdict.OK


def test_an_older_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "version_info", (3, 10, 4, "final", 0))
    found = machine.check_python()
    assert (found.verdict, found.value) == (Verdict.BAD, "3.10.4")


def test_packages_that_are_there_are_told_with_their_versions() -> None:
    (found,) = machine.check_packages(["prefill", "decode"])
    assert found.verdict is Verdict.OK
    for name in ("cryptography", "torch", "mlx", "fastapi"):
        assert f"{name} {importlib.metadata.version(name)}" in found.value
    (found,) = machine.check_packages(["prefill"])
    assert "mlx " not in found.value


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("nowhere-at-all>=1; extra == 'prefill'", "nowhere-at-all is not installed"),
        ("numpy>=9999", "numpy {numpy} is older than 9999"),
        ("nowhere-at-all>=1; extra == 'decode'", None),
        ("nowhere-at-all; extra == 'prefill' and sys_platform == 'elsewhere'", None),
    ],
)
def test_a_package_that_is_missing_or_old_is_named(
    requirement: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: [requirement])
    (found,) = machine.check_packages(["prefill"])
    if problem is None:
        assert found.verdict is Verdict.OK
    else:
        assert found.verdict is Verdict.BAD
        assert found.value == problem.format(numpy=importlib.metadata.version("numpy"))


def test_a_home_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    assert machine.check_home(tmp_path / "none").verdict is Verdict.OK


def test_a_home_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 300)
    found = machine.check_home(home)
    assert (found.verdict, found.value) == (Verdict.BAD, f"{home} cannot be looked at: File name too long")
    assert str(tmp_path) in machine.check_disk(home).value


def test_a_key_that_others_can_read_is_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    (keys / "prefill.ed25519").write_bytes(bytes(32))
    (keys / "prefill.ed25519").chmod(0o600)
    assert machine.check_home(tmp_path).verdict is Verdict.OK
    (keys / "prefill.ed25519").chmod(0o644)
    found = machine.check_home(tmp_path)
    assert found.verdict is Verdict.BAD
    assert "prefill.ed25519 is open to other users" in found.value


@pytest.mark.parametrize(
    ("free", "cache", "verdict"),
    [
        (5e8, 0, Verdict.BAD),
        (5e9, 0, Verdict.WARN),
        (5e10, 0, Verdict.OK),
        (5e10, 6e10, Verdict.WARN),
    ],
)
def test_a_full_disk(
    free: float, cache: float, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free)))
    assert machine.check_disk(tmp_path / "not" / "yet", int(cache)).verdict is verdict
