"""The commands that README.md and docs/operations.md tell people to type, and a place where they can be run.

A command runs in a shell as it is written, but for the words that stand for something (PATH, HOST, ADDRESS, FILE),
fixed ports, and what a test adds at its end. Whatever else it needs comes from the environment, as for a person.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from made_serve import ROOT

DOCUMENTS = ("README.md", "docs/operations.md")
PROGRAMS = "muser|muser-prefill|muser-decode|make|sudo|pip|systemctl|systemd-analyze|caffeinate|curl|python3"
INLINE = re.compile(rf"(?:make|(?:{PROGRAMS}) [^`]+)")
"""What between backquotes is a command: a program and what follows it, or `make` alone."""

START_S = 100.0
RUN_S = 100.0


def commands_of(text: str) -> Iterator[str]:
    """Yield each command of a document: the lines of its shell blocks, without comments, then those in its sentences.

    >>> list(commands_of("```sh\\nmake x \\\\\\n  y  # why\\n```\\nor `muser chat`, of `muser`"))
    ['make x y', 'muser chat']
    """
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if command := re.sub(r"\s+#.*", "", line).strip():
                yield command
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if INLINE.fullmatch(span):
            yield span


def documented() -> dict[str, str]:
    """Every command and the document that has it first, in the order of reading."""
    found: dict[str, str] = {}
    for name in DOCUMENTS:
        for command in commands_of((ROOT / name).read_text()):
            found.setdefault(command, name)
    return found


def filled(command: str, **words: object) -> str:
    """A command with what its placeholders stand for."""
    for word, value in words.items():
        command, count = re.subn(rf"\b{re.escape(word)}\b", str(value), command)
        assert count, f"{command} has no {word}"
    return command


@dataclass
class Running:
    """A process that serves until its stage is struck."""

    process: subprocess.Popen[bytes]
    log: Path
    ports: dict[str, int] = field(default_factory=dict)


class Stage:
    """Folders and processes that commands share; each is made when the first one needs it."""

    def __init__(self, folder: Path, cleanup: contextlib.ExitStack) -> None:
        self.folder = folder
        self.cleanup = cleanup
        self.user_home = folder / "user"
        self.home = self.user_home / ".muser"
        self.home.mkdir(parents=True)
        self.home.chmod(0o700)
        self._count = 0

    def environment(self, home: Path | None = None, **more: object) -> dict[str, str]:
        """What a person's shell has: the environment of the tests is active, and no node is configured."""
        # The tests may have been started by `make test ARGS=...`, whose variables are not this command's.
        of_make = ("MUSER_", "MAKE", "MFLAGS", "ARGS")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"HOME": str(self.user_home), "PATH": path, "USER": getpass.getuser(), "OMP_NUM_THREADS": "1"}
        own["MUSER_HOME"] = str(home or self.home)
        return kept | own | {name: str(value) for name, value in more.items()}

    def run(
        self, line: str, home: Path | None = None, *, status: int | None = 0, said: str = "", **more: object
    ) -> str:
        """Run a line in a shell; return what it printed. `said` is typed; `status` None: any."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=more.pop("cwd", ROOT),  # type: ignore[call-overload]
            env=self.environment(home, **more),
            input=said,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        printed = str(done.stdout + done.stderr)
        assert status is None or done.returncode == status, f"{line}\n{done.returncode}\n{printed}"
        assert "Traceback" not in printed, printed
        return printed

    def start(self, line: str, home: Path | None = None, **more: object) -> Running:
        """Start a line in a shell; it is ended with the stage."""
        self._count += 1
        log = self.folder / f"{self._count}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=ROOT,
                env=self.environment(home, PYTHONUNBUFFERED=1, **more),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

        def end() -> None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30.0)
            process.kill()
            process.communicate()

        self.cleanup.callback(end)
        return Running(process, log)

    def serve(self, line: str, home: Path | None = None, **more: object) -> Running:
        """Start a node; return once it serves, with its ports."""
        import json

        ready = self.folder / f"ready{self._count}.json"
        zero = dict.fromkeys(("MUSER_PREFILL_CONTROL_PORT", "MUSER_PREFILL_DATA_PORT", "MUSER_DECODE_PORT"), 0)
        node = line.split(maxsplit=1)[0].replace("-", "_").upper()
        node_variables = {
            f"{node}_READY_FILE": ready,
            f"{node}_THREADS": 1,
            f"{node}_KV": "f16",
            f"{node}_DTYPE": "f32",
        }
        kept = {name: value for name, value in zero.items() if name.startswith(node)}
        running = self.start(line, home, **kept, **node_variables, **more)
        wait_until(running, ready.exists)
        running.ports = json.loads(ready.read_text())
        return running


def wait_until(running: Running, what: object) -> None:
    """Wait until something is so; a process that ends before that is a failure, with its log."""
    assert callable(what)
    deadline = time.monotonic() + START_S
    while not what():
        assert running.process.poll() is None, running.log.read_text()
        assert time.monotonic() < deadline, running.log.read_text()
        time.sleep(0.05)


def wait_for(running: Running, pattern: str) -> re.Match[str]:
    """Wait for a line in a process's log."""
    wait_until(running, lambda: re.search(pattern, running.log.read_text()))
    found = re.search(pattern, running.log.read_text())
    assert found is not None
    return found


def type_into(running: Running, text: str) -> None:
    assert running.process.stdin is not None
    running.process.stdin.write(text.encode() + b"\n")
    running.process.stdin.flush()


def has(program: str) -> bool:
    return shutil.which(program) is not None


__all__ = ["Running", "Stage", "commands_of", "documented", "filled", "has", "type_into", "wait_for"]
