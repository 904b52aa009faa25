"""Two programs, each run once: Triton decides once in a process whether it interprets or compiles."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[4]


def report(program: str) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton here: it has wheels for Linux alone, and `make test` installs them there")
    done = subprocess.run([sys.executable, TESTS / program], capture_output=True, text=True, check=False, cwd=TESTS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def interpreted() -> dict[str, str]:
    """What each case of `triton_interpreted.py` found wrong."""
    return report("triton_interpreted.py")


@pytest.fixture(scope="session")
def built() -> dict[str, Any]:
    """What `triton_compiled.py` made for each target."""
    return report("triton_compiled.py")
