from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from muser_wire import footprint
from muser_wire.footprint import peak_nbytes, resident_nbytes

ARRAY_NBYTES = 64 << 20


def test_the_peak_stays_and_what_is_resident_follows() -> None:
    before = resident_nbytes()
    held = np.ones(ARRAY_NBYTES, np.uint8)
    during, peak = resident_nbytes(), peak_nbytes()
    assert held[-1] == 1
    del held
    assert peak >= ARRAY_NBYTES
    assert peak_nbytes() >= peak
    if sys.platform == "linux":
        assert before is not None
        assert during is not None
        assert during - before >= ARRAY_NBYTES * 0.9
        # Both count the same process: neither is in another unit than the other.
        assert during * 0.8 <= peak


def test_a_system_that_does_not_say_is_not_guessed_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(footprint, "STATM", tmp_path / "nothing")
    assert resident_nbytes() is None
