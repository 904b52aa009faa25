"""golden.py is what its writer writes."""

from __future__ import annotations

import re

from muser_wire.reference.golden import GOLDEN


def test_hashes_look_like_hashes_and_chunks_change_none() -> None:
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in GOLDEN.values())
    wholes = {name: value for name, value in GOLDEN.items() if ", whole" in name}
    assert wholes
    assert all(GOLDEN[name.replace("whole", "chunks")] == value for name, value in wholes.items())
