from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.home import muser_home


def test_the_environment_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "x"))
    assert muser_home() == tmp_path / "x"
    assert not muser_home().exists()


@pytest.mark.parametrize("value", [None, ""])
def test_the_default_is_below_the_user_s_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("MUSER_HOME", raising=False)
    else:
        monkeypatch.setenv("MUSER_HOME", value)
    assert muser_home() == tmp_path / ".muser"


def test_it_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSER_HOME", "here")
    assert muser_home() == Path(tmp_path) / "here"
