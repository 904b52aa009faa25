"""What a service runs, and the files of its installation that it must be able to read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from muser_wire import private_files
from muser_wire.services.errors import ServiceError

NODE_MODULES = {"prefill": "muser_prefill", "decode": "muser_decode"}

# What is ignored stays so in a tool that this process becomes, and `logs | head` ends `tail` by the first of them.
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True)
class Program:
    """A node as a service starts it: the command, its folder of keys and models, its file, its longest drain."""

    node: str
    home: Path
    config: Path | None
    drain_s: float

    @property
    def command(self) -> list[str]:
        """The command line. It names Python by its whole path, so that the service has this environment."""
        command = [sys.executable, "-m", NODE_MODULES[self.node], "serve"]
        return command if self.config is None else [*command, "--config", str(self.config)]


def installation() -> tuple[Path, ...]:
    """Return the folders that Python and Muser lie in: environment, Python below it, source where it is elsewhere."""
    folders = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parent.parent.parent}
    return tuple(sorted(path for path in folders if not any(path.is_relative_to(other) for other in folders - {path})))


def run_tool(command: Sequence[str]) -> str:
    """Run a tool of the system; return what it printed.

    Raises:
        ServiceError: it is missing or failed; the message has its own words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServiceError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ServiceError(f"`{' '.join(command)}` failed with status {done.returncode}: {said or 'it says nothing'}")
    return done.stdout


def hand_over(command: Sequence[str]) -> NoReturn:
    """Become a tool of the system: this process is the tool's from here on, so who ends it ends the tool.

    Raises:
        ServiceError: it is missing.
    """
    sys.stdout.flush()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in IGNORED_BY_PYTHON}
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise ServiceError(f"{command[0]} cannot be run: {error.strerror or error}") from error


def publish(path: Path, text: str, *, replace: bool) -> bool:
    """Write a file whole or not at all, readable by everybody; return False where it stands there as it should be.

    Raises:
        ServiceError: another one stands there and `replace` is not set, or it cannot be written.
    """
    try:
        if path.exists():
            if path.read_text(encoding="utf-8") == text:
                return False
            if not replace:
                raise ServiceError(f"{path} is there already and differs: uninstall it first, or give --replace")
        path.parent.mkdir(parents=True, exist_ok=True)
        private_files.publish(path, text.encode())
    except OSError as error:
        raise ServiceError(f"{path} cannot be written: {error.strerror or error}") from error
    return True


def remove(path: Path) -> None:
    """Remove a file of a service.

    Raises:
        ServiceError: it is not there, or cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError as error:
        raise ServiceError(f"{path} is not there: nothing to uninstall") from error
    except OSError as error:
        raise ServiceError(f"{path} cannot be removed: {error.strerror or error}") from error
