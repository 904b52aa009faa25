"""A disk that is really full: a small file system in memory, filled to its last page. Mounting one takes root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FILLER = "filler"
NBYTES = 256 << 10


def fill(disk: Path) -> None:
    """Take the last page; empty files can still be made, and that is where half-written ones come from."""
    with contextlib.suppress(OSError), (disk / FILLER).open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def make_room(disk: Path) -> None:
    (disk / FILLER).unlink()


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Yield a disk of 256 KiB, empty yet; without the right to mount one the test skips, and says so."""
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        pytest.skip("mounting a small disk takes root on Linux")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={NBYTES},mode=700", "muser-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def left_on(disk: Path) -> list[str]:
    """What lies there beside the filler, folders left out."""
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.name != FILLER and not path.is_dir())
