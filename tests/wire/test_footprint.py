from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muser_wire import footprint
from muser_wire.footprint import resident_nbytes

ARRAY_NBYTES = 64 << 20
PROGRAM = f"""
import numpy as np
from muser_wire.footprint import peak_nbytes, resident_nbytes
before = resident_nbytes()
held = np.ones({ARRAY_NBYTES}, np.uint8)
during, peak = resident_nbytes(), peak_nbytes()
del held
print(before or 0, during or 0, peak, peak_nbytes())
"""


def test_the_peak_stays_and_what_is_resident_follows() -> None:
    """In a process of its own: in one that has freed memory, an array may lie where something lay before."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, during, peak, after = map(int, told.split())
    assert peak >= ARRAY_NBYTES
    assert after >= peak
    if sys.platform == "linux":
        assert during - before >= ARRAY_NBYTES * 0.9
        # Both count the same process: neither is in another unit than the other.
        assert during * 0.8 <= peak


def test_a_system_that_does_not_say_is_not_guessed_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(footprint, "STATM", tmp_path / "nothing")
    assert resident_nbytes() is None
