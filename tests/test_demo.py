"""The whole system as a newcomer meets it: `muser demo`, real nodes, real weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def processes_in(folder: Path) -> list[str]:
    """Command lines that mention `folder`: a node's ready file lies there while it runs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_runs_and_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "muser_wire.cli", "demo", "--model", str(smollm2), "--max-tokens", "24"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[2:22].strip(): line[22:].split() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert rows["route"] == ["remote", "local"]
    assert rows["prompt tokens"][0] == rows["prompt tokens"][1]
    # 30 layers, 3 heads of 64, keys and values, two bytes each; the last prompt token is held back.
    token_nbytes = 30 * 2 * 3 * 64 * 2
    expected = (int(rows["prompt tokens"][0]) - 1) * token_nbytes
    assert [int(cell.replace(",", "")) for cell in rows["payload bytes"]] == [expected, 0]
    assert int(rows["verified segments"][0]) > 0
    assert re.search("The two answers are equal", done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []
