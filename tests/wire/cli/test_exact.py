"""`muser exact conformance`: every library in one table, and an exit status that says whether all are equal."""

from __future__ import annotations

import json

import pytest

from muser_wire.cli import exact
from muser_wire.cli.__main__ import main
from muser_wire.reference.golden import GOLDEN


def test_every_library_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exact", "conformance"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["numpy", "torch", "mlx"]
    attention = next(line for line in lines if line.startswith("attention"))
    assert attention.split()[1:] == ["equal"] * 3
    assert lines[-2:] == [
        "rules, version 1: a961f304c2ca22fd",
        "conformance: 63a2c1f30c28ae61 is what the rules give",
    ]
    assert not [line for line in lines if "DIFFERS" in line]


def test_a_difference_is_an_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "OBSERVERS", {})
    monkeypatch.setitem(GOLDEN, "norms", "0" * 16)
    assert main(["exact", "conformance", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["libraries"]) == ["numpy"]
    assert found["libraries"]["numpy"]["differing"] == ["norms"]
    assert found["rules_version"] == 1


def test_a_library_that_fails_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exact", "conformance", "--device", "nonsense"]) == 2
    assert "torch could not be observed" in capsys.readouterr().err
