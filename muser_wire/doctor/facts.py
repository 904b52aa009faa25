"""What a node says of itself when it is asked without being started: `python -m muser_prefill.facts`, or decode.

A node's process imports torch or mlx and reads every weight once, so it is a process of its own; it prints one JSON
object. A part that failed has its error in the place of its facts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.identities import Identities, show
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.settings.keys import Keys
from muser_wire.settings.settings import Settings

MODULES = {"prefill": "muser_prefill.facts", "decode": "muser_decode.facts"}
FACTS_TIMEOUT_S = 600.0
"""Every weight is read and hashed: 60 GB at 1 GB/s take a minute."""

MEMINFO = Path("/proc/meminfo")
ERROR_CHARS = 600

EXIT_UNREADABLE = 2

Part = Callable[[], Mapping[str, Any]]
Config = TypeVar("Config")


@dataclass(frozen=True)
class Node(Generic[Config]):
    """How a node tells its facts: from its keys and what makes its configuration of their values.

    `model` reads the weights; `errors` are those of the node's own that are facts and no faults of this program.
    """

    keys: Keys
    configure: Callable[[argparse.Namespace], Config]
    configuration: Callable[[Config], Mapping[str, Any]]
    device: Callable[[Config], Mapping[str, Any]]
    model: Callable[[Config], Mapping[str, Any]]
    errors: tuple[type[Exception], ...]
    more: Mapping[str, Callable[[Config], Mapping[str, Any]]] = field(default_factory=dict)
    """Further parts, by name."""

    def tell(self, argv: Sequence[str] | None) -> int:
        """Print the facts as JSON; return the exit status, 2 for a configuration that cannot be read."""
        options = argparse.ArgumentParser(description=__doc__)
        options.add_argument("--config")
        options.add_argument("--no-model", action="store_true", help="leave the model unread")
        chosen = options.parse_args(argv)
        try:
            read = Settings(self.keys, {}, os.environ, muser_home(), chosen.config).read()
            config = self.configure(read.namespace())
        except WireError as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_UNREADABLE
        parts: dict[str, Part] = {
            "configuration": lambda: {"file": str(read.file or ""), **self.configuration(config)},
            "device": lambda: self.device(config),
            "model": lambda: {} if chosen.no_model else self.model(config),
            **{name: partial(part, config) for name, part in self.more.items()},
        }
        json.dump(gather(parts, self.errors), sys.stdout)
        return 0


class RefusedKernels(logging.Handler):
    """Collects what kernel admission says of kernels that missed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        text = record.getMessage()
        if text.startswith("kernel_refused"):
            self.seen.append(text.removeprefix("kernel_refused").strip())


def gather(parts: Mapping[str, Part], errors: tuple[type[Exception], ...]) -> dict[str, Any]:
    """Return each part's facts, or under "error" what it raised; parts after a failed one are still asked."""
    found: dict[str, Any] = {}
    caught: tuple[type[Exception], ...] = (WireError, OSError, *errors)
    for name, part in parts.items():
        try:
            found[name] = dict(part())
        except caught as error:
            found[name] = {"error": str(error).strip()[:ERROR_CHARS] or type(error).__name__}
    return found


def identity_facts(identities: Identities) -> dict[str, str]:
    """Return identities as text: digests in hex."""
    found = {one.name: getattr(identities, one.name) for one in fields(Identities)}
    return {name: value.hex() if isinstance(value, bytes) else show(value) for name, value in found.items()}


def model_facts(
    checkpoint: Checkpoint, identities: Identities, kernels: Sequence[str] = (), refused: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a model is: its kind and size in bytes, its identities, kernels admitted and refused for it."""
    return {
        "family": checkpoint.spec.family,
        "layers": len(checkpoint.spec.layers),
        "encoding": checkpoint.encoding,
        "nbytes": sum(checkpoint.weight(name).nbytes for name in checkpoint.names()),
        "lane": identities.lane,
        "kernels": list(kernels),
        "refused": list(refused),
        "identities": identity_facts(identities),
    }


def system_memory(meminfo: Path = MEMINFO) -> dict[str, int]:
    """Return total and available memory of a Linux machine, in bytes; nothing where the system has no such file.

    On a GB10 processor and GPU share it, and this says more of what is free than the driver does.
    """
    try:
        lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
    except OSError:
        return {}
    names = {"total_nbytes": "MemTotal", "available_nbytes": "MemAvailable"}
    return {ours: int(lines[theirs]) * 1024 for ours, theirs in names.items() if theirs in lines}


def ask(node: str, config: str | None, *, model: bool = True) -> dict[str, Any]:
    """Return a node's facts; `model` False leaves the weights unread.

    A node that cannot say anything gives {"error": why}.
    """
    flags = ["--config", config] if config is not None else []
    command = [sys.executable, "-m", MODULES[node], *flags, *([] if model else ["--no-model"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FACTS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {FACTS_TIMEOUT_S:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if line]
        return {"error": said[-1][:ERROR_CHARS] if said else f"it ended with status {done.returncode}"}
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts
