"""What every benchmark needs: peers as processes, rounds that interleave, a table, a result file.

Only ratios inside one run mean something on a shared machine, so peers take turns: each is idle while another runs,
and a round holds one measurement of each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS_VENV = ROOT / ".venv-bench"
PEERS_DIR = ROOT / "bench" / "peers"
CONSTRAINTS = ROOT / "constraints.txt"

STDERR_TAIL_NBYTES = 4096
"""How much of a failed peer's last words an error shows."""


class BenchError(Exception):
    """A measurement cannot be made, or must not be believed."""


class PeerUnavailable(BenchError):
    """A peer could not be installed here."""


class Peer:
    """One contestant: a script in a Python of its own, answering JSON lines."""

    def __init__(self, name: str, script: str, python: Path, threads: int) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed in `close`
        self._process = subprocess.Popen(
            [str(python), str(PEERS_DIR / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **thread_limits(threads), "PYTHONPATH": str(ROOT)},
        )

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return the peer's answer to one request.

        Raises:
            BenchError: the peer has ended; the message holds the end of what it wrote to standard error.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BenchError(f"{self.name} was started without pipes")
        try:
            print(json.dumps({"op": op, **fields}), file=stdin, flush=True)
        except BrokenPipeError:
            raise self._ended(op) from None
        line = stdout.readline()
        if not line:
            raise self._ended(op)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pause(self) -> None:
        """Stop the process where it stands, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on. Harmless if it was not stopped."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _ended(self, op: str) -> BenchError:
        status = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - STDERR_TAIL_NBYTES))
        words = self._stderr.read().decode(errors="replace")
        return BenchError(f"{self.name} ended with status {status} in {op}:\n{words}")


def thread_limits(threads: int) -> dict[str, str]:
    """Return the environment variables that give every library the same number of threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def compiling(environment: Mapping[str, str], flags: str) -> dict[str, str]:
    """Return an environment for compiling peers on a processor with these `flags`, as /proc/cpuinfo lists them.

    GCC's header says of `ldtilecfg` that it reads 8 bytes, so the rest of llama.cpp's tile configuration is dead stores
    to the optimiser, and its first AMX instruction is illegal (ggml-org/llama.cpp, pull request 26954).
    """
    if "amx_tile" not in flags.split():
        return dict(environment)
    kept = f"{environment.get('CXXFLAGS', '')} -fno-tree-dse -fno-dse"
    return {**environment, "CXXFLAGS": kept.strip()}


def succeeds(*command: str) -> bool:
    """Run a command that may compile a peer, its output on standard error; return whether it ended well."""
    environment = compiling(os.environ, _cpuinfo("flags"))
    return subprocess.run(command, check=False, stdout=sys.stderr, env=environment).returncode == 0


def peer_python(venv: Path, requirements: Sequence[str]) -> Path:
    """Return the Python of the peers' environment with `requirements` in it; installs what is missing.

    Raises:
        PeerUnavailable: pip failed; its output is on standard error.
    """
    python = venv / "bin" / "python"
    key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:16]
    stamp = venv / f".installed-{key}"
    if stamp.exists():
        return python
    print(f"installing {', '.join(requirements)} into {venv}", file=sys.stderr)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    # Some peers have no wheel and are compiled: that takes minutes, once.
    if not succeeds(*pip, *requirements):
        raise PeerUnavailable(f"pip could not install {', '.join(requirements)}")
    stamp.touch()
    return python


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of every benchmark that measures against peers."""
    parser.add_argument("--threads", type=int, default=2, help="threads of each contestant")
    parser.add_argument("--venv", type=Path, default=PEERS_VENV, help="environment of the peers, made when missing")
    parser.add_argument("--out", type=Path, help="write the samples here, as JSON")


@dataclass(frozen=True)
class Samples:
    """Measurements of one case by contestant, in the order of the rounds. All in one unit, such as seconds."""

    by_name: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Return a contestant's median."""
        return statistics.median(self.by_name[name])

    def least(self, name: str) -> float:
        """Return a contestant's least measurement: of times, the one that others on the machine disturbed least."""
        return min(self.by_name[name])

    def ratio(self, name: str, reference: str) -> float:
        """Return the median over the rounds of `name` divided by `reference` in the same round."""
        pairs = zip(self.by_name[name], self.by_name[reference], strict=True)
        return statistics.median(one / other for one, other in pairs)


def interleave(peers: Sequence[Peer], rounds: int, call: Callable[[Peer], float]) -> Samples:
    """Return `rounds` measurements of each peer, taken in turn (A B C A B C ...).

    One round before them does not count.
    """
    samples: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for counted in (False, *[True] * rounds):
        for peer in peers:
            value = call(peer)
            if counted:
                samples[peer.name].append(value)
    return Samples({name: tuple(values) for name, values in samples.items()})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in plain text: the first column to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]])

    return "\n".join([text(header), "  ".join("-" * width for width in widths), *map(text, rows)])


@dataclass(frozen=True)
class Goal:
    """What a measured ratio shall at least be. `measured` None: it could not be measured, which is a miss."""

    what: str
    least: float
    measured: float | None

    @property
    def met(self) -> bool:
        """Whether it was measured and is large enough."""
        return self.measured is not None and self.measured >= self.least


def judge(goals: Sequence[Goal]) -> int:
    """Print what became of each goal; return 1 when one was missed."""
    for goal in goals:
        measured = "not measured" if goal.measured is None else f"{goal.measured:.2f}"
        print(f"{'met   ' if goal.met else 'MISSED'} {goal.what}: {measured}, goal {goal.least:.2f}")
    return 0 if all(goal.met for goal in goals) else 1


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "tcp_congestion_control": _congestion_control(),
    }


def _congestion_control() -> str:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor()


def _cpuinfo(field: str) -> str:
    """Return what Linux says of the first processor; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def write_result(out: Path, host: Mapping[str, Any], **result: Any) -> None:
    """Write one run as JSON: the machine as `machine()` saw it before the run, the command, and `result`."""
    record = {"machine": host, "command": sys.argv, "unix_time_s": int(time.time()), **result}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Samples):
        return value.by_name
    raise TypeError(f"{type(value).__name__} does not belong into a result")
