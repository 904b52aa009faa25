"""Fake nodes under the real nodes' names, found first by every process that a test starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_node.py")


@pytest.fixture
def fake_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the fakes in the way of `python -m muser_prefill` and `-m muser_decode`; call it to pick a fault."""
    place = tmp_path / "fakes"
    for role in ("prefill", "decode"):
        package = place / f"muser_{role}"
        package.mkdir(parents=True)
        program = (
            f"import runpy, sys\nsys.argv.insert(1, {role!r})\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n"
        )
        (package / "__main__.py").write_text(program)
        (package / "__init__.py").touch()
    # `python -m` looks in the current folder first, whatever is installed.
    monkeypatch.chdir(place)
    monkeypatch.delenv("FAKE_NODE", raising=False)
    return lambda fault: monkeypatch.setenv("FAKE_NODE", fault)
