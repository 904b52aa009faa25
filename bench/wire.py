"""Authenticated handoffs against a raw TCP stream, and beside two engines that others use: rate and processor time.

Each contestant is two processes on loopback. Ours is the product: Open, stream, seal, every segment encrypted and
verified, received into memory that was made before. The others only move bytes. Planes come from memory, so no model
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.driver import (
    PEERS_VENV,
    BenchError,
    Peer,
    PeerUnavailable,
    Samples,
    machine,
    peer_python,
    table,
    write_result,
)
from bench.synthetic import Shape

OURS, RAW = "muser", "raw TCP"
MOONCAKE, NIXL = "Mooncake TCP", "NIXL UCX TCP"
REQUIREMENTS = {
    MOONCAKE: ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),
    NIXL: ("nixl==1.5.1", "numpy"),
}
SCRIPTS = {RAW: "wire_tcp.py", OURS: "wire_muser.py", MOONCAKE: "wire_mooncake.py", NIXL: "wire_nixl.py"}

SIZES = (16_000_000, 128_000_000, 1_000_000_000)
CHECK_NBYTES = 16_000_000
GOAL_NBYTES = 128_000_000
GOAL_BYTES_S = 1.2e9
POLLING = {MOONCAKE, NIXL}
"""Engines whose threads ask for work all the time; on two cores an idle one would slow the others down."""

GOAL_OF_RAW = 0.4
"""Both goals hold from GOAL_NBYTES on, on an idle machine of two cores."""


@dataclass(frozen=True)
class Transfer:
    """One transfer: seconds by the sink's clock, processor seconds of each side."""

    nbytes: int
    seconds: float
    source_cpu_s: float
    sink_cpu_s: float


@dataclass
class Contestant:
    """Two processes that move bytes from one to the other."""

    name: str
    source: Peer
    sink: Peer
    transfers: dict[int, list[Transfer]] = field(default_factory=dict)

    def move(self, size: int, nbytes: int) -> None:
        """Move `nbytes` bytes and keep what it cost as a transfer of the nominal `size`."""
        with self._awake():
            before_s = self.source.call("cpu")["cpu_s"]
            told = self.sink.call("pull", nbytes=nbytes)
            source_cpu_s = self.source.call("cpu")["cpu_s"] - before_s
        if told["nbytes"] != nbytes:
            raise BenchError(f"{self.name} moved {told['nbytes']} of {nbytes} bytes")
        self.transfers.setdefault(size, []).append(Transfer(nbytes, told["seconds"], source_cpu_s, told["cpu_s"]))

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """For one turn; between its turns an engine that polls is stopped."""
        sides = (self.source, self.sink) if self.name in POLLING else ()
        for side in sides:
            side.resume()
        try:
            yield
        finally:
            for side in sides:
                side.pause()

    def median(self, size: int) -> tuple[float, float, float]:
        """Return (bytes a second, source's and sink's processor seconds a GB), each the median of the rounds."""
        rows = [
            (one.nbytes / one.seconds, one.source_cpu_s * 1e9 / one.nbytes, one.sink_cpu_s * 1e9 / one.nbytes)
            for one in self.transfers[size]
        ]
        rate, source, sink = (statistics.median(column) for column in zip(*rows, strict=True))
        return rate, source, sink

    def check(self) -> None:
        """Move some bytes and compare them with the source's.

        Raises:
            BenchError: they differ; no time of this contestant means anything.
        """
        with self._awake():
            told = self.sink.call("check", nbytes=CHECK_NBYTES)
            same = told["wrong"] == 0 if self.name == OURS else told == self.source.call("digest", nbytes=CHECK_NBYTES)
        if not same:
            raise BenchError(f"{self.name} received other bytes than were sent")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's flags."""
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a transfer")
    parser.add_argument("--rounds", type=int, default=7, help="transfers of each contestant and size")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure other engines")
    parser.add_argument("--venv", type=Path, default=PEERS_VENV, help="environment of the peers, made when missing")
    parser.add_argument("--out", type=Path, default=Path("build/bench/wire.json"))


def run(arguments: argparse.Namespace) -> bool:
    """Measure, print, write the result; return whether the goals were met."""
    host = machine()
    sizes = [int(text) for text in arguments.sizes.split(",")]
    with ExitStack() as stack:
        contestants, missing = start_all(arguments, stack)
        for size in sizes:
            measure(contestants, size, arguments.rounds)
    ratios = {size: samples(contestants, size).ratio(RAW, OURS) for size in sizes}
    for size in sizes:
        print(report(contestants, size), end="\n\n")
    for name, reason in missing.items():
        print(f"{name} is not measured: {reason}")
    met = all(goal_met(contestants, size, ratios[size]) for size in sizes if size >= GOAL_NBYTES)
    goal = f"{GOAL_BYTES_S / 1e9} GB/s and {GOAL_OF_RAW} of raw TCP from {GOAL_NBYTES / 1e6:.0f} MB on"
    print("Only ours encrypts, authenticates and seals.")
    print(f"Goal, idle: {goal}: {'met' if met else 'missed'}. Load before the run: {host['load_before']:.1f}")
    print(f"TCP congestion control: {host['tcp_congestion_control']}")
    kept = {one.name: {size: [t.__dict__ for t in one.transfers[size]] for size in sizes} for one in contestants}
    write_result(arguments.out, host, samples=kept, of_raw=ratios, missing=missing, met=met)
    return met


def start_all(arguments: argparse.Namespace, stack: ExitStack) -> tuple[list[Contestant], dict[str, str]]:
    """Return every contestant that starts and moves the right bytes, and why the others do not."""
    contestants = [start(name, Path(sys.executable), stack) for name in (RAW, OURS)]
    missing: dict[str, str] = {}
    for name in (MOONCAKE, NIXL) if arguments.peers else ():
        try:
            contestants.append(start(name, peer_python(arguments.venv, REQUIREMENTS[name]), stack))
        except PeerUnavailable as error:
            missing[name] = str(error)
        except BenchError as error:
            missing[name] = str(error).strip().splitlines()[-1]
    return contestants, missing


def start(name: str, python: Path, stack: ExitStack) -> Contestant:
    """Start both sides of a contestant and check that it moves bytes unchanged."""
    print(f"starting {name}", file=sys.stderr)
    sides = [Peer(f"{name}, {side}", SCRIPTS[name], python, 1) for side in ("source", "sink")]
    for side in sides:
        stack.callback(side.close)
    contestant = Contestant(name, *sides)
    contestant.sink.call("sink", address=contestant.source.call("source")["address"])
    contestant.check()
    return contestant


def measure(contestants: Sequence[Contestant], size: int, rounds: int) -> None:
    """Let each contestant move the same bytes in turn, `rounds` times; one round before them does not count."""
    shape = Shape()
    nbytes = (shape.prompt_tokens(size) - 1) * shape.token_nbytes
    for _ in range(rounds + 1):
        for contestant in contestants:
            contestant.move(size, nbytes)
    for contestant in contestants:
        del contestant.transfers[size][0]


def samples(contestants: Sequence[Contestant], size: int) -> Samples:
    """Return seconds by contestant."""
    return Samples({one.name: tuple(t.seconds for t in one.transfers[size]) for one in contestants})


def report(contestants: Sequence[Contestant], size: int) -> str:
    """Return the table of one size."""
    seconds = samples(contestants, size)
    rows = []
    for one in contestants:
        rate, source, sink = one.median(size)
        of_raw = "" if one.name == RAW else f"{seconds.ratio(RAW, one.name):.2f}"
        rows.append([one.name, f"{rate / 1e9:.2f}", of_raw, f"{source:.2f}", f"{sink:.2f}"])
    return table([f"{size / 1e6:.0f} MB", "GB/s", "of raw", "source CPU s/GB", "sink CPU s/GB"], rows)


def goal_met(contestants: Sequence[Contestant], size: int, of_raw: float) -> bool:
    """Tell whether our rate and its ratio to raw TCP reach the goals."""
    ours = next(one for one in contestants if one.name == OURS)
    return ours.median(size)[0] >= GOAL_BYTES_S and of_raw >= GOAL_OF_RAW


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="bench.wire", description=__doc__)
    add_arguments(parser)
    arguments: Any = parser.parse_args(argv)
    try:
        return 0 if run(arguments) else 1
    except BenchError as error:
        print(f"bench.wire: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
