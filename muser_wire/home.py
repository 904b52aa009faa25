"""The folder where Muser keeps models, keys and logs."""

from __future__ import annotations

import os
from pathlib import Path


def muser_home() -> Path:
    """Return the folder that the environment variable MUSER_HOME names, else ~/.muser. It may not exist yet."""
    return Path(os.environ.get("MUSER_HOME") or "~/.muser").expanduser().absolute()
