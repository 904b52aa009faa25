"""Both nodes as child processes on loopback: started, watched until ready, stopped, never left behind.

The commands here know a node only by its command line, its ready file and its exit code, so this
package needs neither torch nor mlx.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from muser_wire.errors import WireError
from muser_wire.numerics import Lane
from muser_wire.process import interruptions_held
from muser_wire.settings.keys import NO_FILE

NODE_VARIABLES = ("MUSER_PREFILL_", "MUSER_DECODE_")
"""What the variables begin with that set up the user's own nodes."""

PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that a child gets when the thread that forked it ends."""

DRAIN_S = 5
"""What a node leaves to its running work after SIGTERM, in seconds: who pressed Ctrl-C waits for it."""

STOP_TIMEOUT_S = 3.0 * DRAIN_S
"""How long a node may take to end after SIGTERM before it is killed, in seconds."""

POLL_S = 0.05
"""Pause between two looks at a ready file, in seconds."""

LOG_TAIL_LINES = 40
"""How much of a failing node's log is worth showing."""


class NodeFailed(WireError):
    """A node ended, or was not ready in time. `node` is its name, `log` the end of its log, perhaps empty."""

    code = "node_failed"

    def __init__(self, node: str, what: str, log: str) -> None:
        super().__init__(f"the {node} node {what}")
        self.node = node
        self.log = log


@dataclass(frozen=True)
class PairOptions:
    """How the two nodes are started. `folder` takes ready files and logs; `http_port` 0 is any free one.

    In the native lane both compute in `dtype`: float32, where an answer does not depend on which node prefilled.
    `route` is the consumer's policy: auto, remote or local. `cache_memory_mb` is what each may keep of computed
    prompts, None its own default; 0 where the same prompt shall go the same way twice.
    """

    model: Path
    folder: Path
    http_port: int = 0
    start_timeout_s: float = 180.0
    route: str = "auto"
    lane: Lane = Lane.NATIVE
    dtype: str = "f32"
    kv: str = "f16"
    cache_memory_mb: int | None = None
    threads: int = field(default_factory=lambda: threads_per_node(os.cpu_count() or 1))


def pause() -> None:
    """Wait a moment between two looks at a ready file."""
    time.sleep(POLL_S)


def threads_per_node(cores: int) -> int:
    """Return how many threads each node computes with: more than half the cores and the two starve each other.

    >>> [threads_per_node(cores) for cores in (1, 2, 3, 20)]
    [1, 1, 1, 10]
    """
    return max(1, cores // 2)


class Node:
    """One node's process. Without a pipe for its output it writes to a log file beside its ready file."""

    def __init__(self, name: str, command: list[str], folder: Path, *, piped: bool) -> None:
        self.name = name
        self.ready_file = folder / f"{name}.ready.json"
        self.log_file = folder / f"{name}.log"
        self.started_at = time.monotonic()
        self.ready_s = 0.0
        """Seconds from the start to the ready file."""
        self.ports: dict[str, int] = {}
        """What the ready file says, once it is there."""
        command = [*command, "--ready-file", str(self.ready_file)]
        if piped:
            self.process = _spawn(command, subprocess.PIPE)
        else:
            with self.log_file.open("wb") as log:
                self.process = _spawn(command, log.fileno())

    def wait_ready(self, timeout_s: float, idle: Callable[[], object]) -> None:
        """Return when the node is ready; `idle` is called between two looks, and may take a moment.

        Raises:
            NodeFailed: the node ended, or `timeout_s` seconds have passed.
        """
        while not self.ready_file.exists():
            self.check_alive()
            if time.monotonic() - self.started_at > timeout_s:
                raise NodeFailed(self.name, f"was not ready within {timeout_s:g} s", self.log_tail())
            idle()
        self.ready_s = time.monotonic() - self.started_at
        self.ports = json.loads(self.ready_file.read_text())

    def check_alive(self) -> None:
        """Raise NodeFailed if the node has ended."""
        code = self.process.poll()
        if code is not None:
            raise NodeFailed(self.name, describe_exit(code), self.log_tail())

    def log_tail(self) -> str:
        """Return the last lines of the log file; empty where the output went to a pipe."""
        if not self.log_file.exists():
            return ""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def kill(self) -> None:
        """End the node and its process group at once, as a pulled plug would; one that has ended is left alone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> int:
        """Ask the node to drain, wait, and return its exit code; after STOP_TIMEOUT_S it is killed."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.kill()
        return self.process.returncode


@dataclass
class Pair:
    """The two nodes, as far as they have been started."""

    options: PairOptions
    piped: bool
    nodes: list[Node] = field(default_factory=list)

    def start(self, on_start: Callable[[Node], None], idle: Callable[[], object] = pause) -> None:
        """Start the producer, then the consumer that is told where it listens; return when both are ready.

        Raises:
            NodeFailed: one of them ended or was not ready in time.
        """
        for name, command in (("prefill", self._prefill_command), ("decode", self._decode_command)):
            with interruptions_held():
                node = Node(name, command(), self.options.folder, piped=self.piped)
                self.nodes.append(node)
            on_start(node)
            node.wait_ready(self.options.start_timeout_s, idle)

    @property
    def prefill(self) -> Node:
        """The producer."""
        return self.nodes[0]

    @property
    def decode(self) -> Node:
        """The consumer, whose HTTP port is `ports["port"]`."""
        return self.nodes[1]

    def stop(self) -> list[int]:
        """Stop every node that runs, consumer first, and return their exit codes in that order."""
        return [node.stop() for node in reversed(self.nodes) if node.process.returncode is None]

    def _prefill_command(self) -> list[str]:
        return self._command("muser_prefill", "--host", "127.0.0.1", "--control-port", "0", "--data-port", "0")

    def _decode_command(self) -> list[str]:
        producer = f"127.0.0.1:{self.prefill.ports['control_port']}"
        port = str(self.options.http_port)
        addresses = ["--host", "127.0.0.1", "--port", port, "--producer", producer]
        return self._command("muser_decode", *addresses, "--route", self.options.route)

    def _command(self, module: str, *addresses: str) -> list[str]:
        o = self.options
        types = ["--dtype", o.dtype, "--kv", o.kv] if o.lane is Lane.NATIVE else []
        numerics = ["--lane", o.lane.value, *types, "--threads", str(o.threads)]
        kept = [] if o.cache_memory_mb is None else ["--cache-memory-mb", str(o.cache_memory_mb)]
        sizes = ["--drain-s", str(DRAIN_S), *kept]
        # The two show what the flags here say, whatever the user's own nodes are configured to do.
        command = [sys.executable, "-m", module, "serve", "--config", NO_FILE, "--model", str(o.model)]
        return [*command, *addresses, *numerics, *sizes]


@contextlib.contextmanager
def running_pair(options: PairOptions, *, piped: bool = False) -> Iterator[Pair]:
    """Yield a pair that has still to be started, and stop what runs of it however the block ends."""
    pair = Pair(options, piped)
    try:
        yield pair
    finally:
        pair.stop()


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C inside the block, so that they too unwind it and stop the nodes."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def describe_exit(code: int) -> str:
    """Return what a process's exit code says, as the rest of a sentence.

    >>> describe_exit(-9), describe_exit(2)
    ('was ended by SIGKILL', 'ended with exit code 2')
    """
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _environment() -> dict[str, str]:
    """Return this process's environment without the settings of the user's own nodes."""
    return {name: value for name, value in os.environ.items() if not name.startswith(NODE_VARIABLES)}


def _spawn(command: list[str], output: int) -> subprocess.Popen[bytes]:
    """Start a node in a session of its own, so that Ctrl-C reaches the command alone, which then stops the nodes."""
    return subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_dies_with(os.getpid()),  # noqa: PLW1509 - no thread of this program holds a lock at this point
    )


def _dies_with(parent: int) -> Callable[[], None] | None:
    """Return what a new child does to be killed when `parent` dies, however that happens; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def arm() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return arm
