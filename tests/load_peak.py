"""How much memory loading a model takes, measured in a process that does nothing else.

What the file's mapping adds is left out, because the system takes those pages back when it needs them: all of them are
touched before anything is measured.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's counters of a process")

MEASURE = """
def kilobytes(field):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])

# The libraries' own first allocations are none of the model's.
load(open_checkpoint(Path(sys.argv[2])))
checkpoint = open_checkpoint(Path(sys.argv[1]))
for name in checkpoint.names():
    checkpoint.weight(name).stored.data[::4096].sum()
# From here on the highest mark counts anew.
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
decoder = load(checkpoint)
print((kilobytes("VmHWM") - before) * 1024, (kilobytes("VmRSS") - before) * 1024)
"""


@dataclass(frozen=True)
class Loading:
    """Bytes above those before: at the worst moment, and afterwards."""

    peak: int
    remains: int


def fetched(name: str) -> Path:
    """A fetched model's file. Its absence is a failure: a skip would hide the real weights."""
    path = fetched_path(name, muser_home())
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make test`, or `muser model fetch {name}` once", pytrace=False)
    return path


def measure(load: str, model: Path, other: Path) -> Loading:
    """Measure loading `model`, after `other` was. `load` is source that defines `load(checkpoint)`."""
    imports = "import sys\nfrom pathlib import Path\nfrom muser_wire.model.checkpoint import open_checkpoint\n"
    source = f"{imports}{load}\n{MEASURE}"
    command = [sys.executable, "-c", source, str(model), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return Loading(*map(int, done.stdout.split()))
