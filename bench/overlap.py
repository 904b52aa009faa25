"""Does the wire hide behind the computation? Time to the seal against max(compute, wire) and one segment.

A producer that takes a known time for a chunk sends over a link of a known rate: loopback that the kernel shapes
in a network namespace of its own where that is permitted, and the producer's own pacing on plain loopback. Every
layer of the model that it pretends to run fills one segment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.driver import BenchError, Peer, machine, table, write_result
from bench.timeline import Span, timeline

SHAPE = {"layers": 16, "kv_heads": 2, "head_dim": 128, "chunk_tokens": 1024}
SEGMENTS = 16
"""Segments of a chunk: a layer's planes of 1,024 tokens are 1 MiB, and one segment."""
SEGMENT_NBYTES = 1 << 20

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
LOADS = {"wire-bound": 0.5, "balanced": 1.0, "compute-bound": 2.0}
"""Computation of a chunk as a multiple of its time on the wire."""
RATE = 120e6
"""Bytes a second: slow enough that neither sealing nor the processor is what limits."""
TOLERANCE = 0.05
SHORT_CHUNKS = 8
"""Longer handoffs are measured once: they take seconds, against which a hiccup is nothing."""
PAUSE_S = 0.1
"""Between handoffs: pacing makes up for short gaps, and one handoff's gap is not to speed the next one up."""
PICTURE = ("balanced", 4)
"""The case that the timeline shows."""


@dataclass(frozen=True)
class Case:
    """One handoff. Times in seconds."""

    link: str
    load: str
    chunks: int
    chunk_s: float
    wire_s: float
    measured_s: float

    @property
    def predicted_s(self) -> float:
        """The slower of both stages, and one segment in the other: before the first can start, or after it ended."""
        compute_s, segments = self.chunk_s * self.chunks, SEGMENTS * self.chunks
        return max(compute_s + self.wire_s / segments, self.wire_s + compute_s / segments)

    @property
    def error(self) -> float:
        """How much longer it took than predicted, as a part of the prediction."""
        return self.measured_s / self.predicted_s - 1

    def row(self) -> list[str]:
        """Return this case as a line of the table."""
        times = (self.chunk_s * self.chunks, self.wire_s, self.predicted_s, self.measured_s)
        return [self.link, self.load, str(self.chunks), *(f"{s:.3f}" for s in times), f"{self.error:+.1%}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's flags."""
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)), help="lengths of the prompts, in chunks")
    parser.add_argument("--rate", type=float, default=RATE, help="the link's bytes a second")
    parser.add_argument("--rounds", type=int, default=3, help="handoffs of each short case; the middle one counts")
    parser.add_argument("--out", type=Path, default=Path("build/bench/overlap.json"))
    parser.add_argument("--svg", type=Path, default=Path("build/bench/overlap.svg"))


def run(arguments: argparse.Namespace) -> bool:
    """Measure over each link, print, draw; return whether every case is within the tolerance."""
    host = machine()
    chunks = [int(text) for text in arguments.chunks.split(",")]
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="muser-bench-") as folder:
        for link in ("paced", "shaped"):
            with ExitStack() as stack:
                try:
                    pair = TracedPair(link, arguments.rate, Path(folder), stack)
                except BenchError as error:
                    print(f"{link} link is not measured: {error}", file=sys.stderr)
                    continue
                cases += measure(pair, chunks, arguments)
    head = ["link", "load", "chunks", "compute s", "wire s", "predicted s", "seal s", "off by"]
    print(table(head, [case.row() for case in cases]))
    worst = max(cases, key=lambda case: abs(case.error))
    print(f"worst {worst.error:+.1%}; goal: within {TOLERANCE:.0%}. Timeline: {arguments.svg}")
    write_result(arguments.out, host, samples=[case.__dict__ for case in cases], worst=worst.error, goal=TOLERANCE)
    return abs(worst.error) <= TOLERANCE


def measure(pair: TracedPair, chunks: Sequence[int], arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield every case over one link."""
    pair.handoff(1, 0.0)
    for load, factor in LOADS.items():
        chunk_s = factor * SEGMENTS * SEGMENT_NBYTES / arguments.rate
        for count in chunks:
            print(f"{pair.link}, {load}, {count} chunks", file=sys.stderr)
            rounds = arguments.rounds if count <= SHORT_CHUNKS else 1
            measured = sorted(pair.handoff(count, chunk_s) for _ in range(rounds))
            if (load, count) == PICTURE:
                title = f"{count} chunks of 16 MiB, each computed in {chunk_s * 1e3:.0f} ms"
                arguments.svg.parent.mkdir(parents=True, exist_ok=True)
                arguments.svg.write_text(
                    timeline(in_flight(pair.spans()), f"{title}, over {arguments.rate / 1e6:.0f} MB/s")
                )
            wire_s = count * SEGMENTS * SEGMENT_NBYTES / arguments.rate
            yield Case(pair.link, load, count, chunk_s, wire_s, measured[len(measured) // 2])


def in_flight(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with each segment's time on the wire: from the sender's hands until the receiver has it whole.

    A sender alone sees only how long its own socket took. Both clocks are one, as both sides run on one machine.
    """
    arrived_ns = {span["index"]: span["start_ns"] for span in spans if span["kind"] == "verify"}
    return [{**span, "stop_ns": arrived_ns[span["index"]]} if span["kind"] == "wire" else span for span in spans]


class TracedPair:
    """A producer and a consumer in processes of their own, with a trace each, joined by a link of a known rate."""

    def __init__(self, link: str, rate: float, folder: Path, stack: ExitStack) -> None:
        """Start both; `link` is "paced" or "shaped".

        Raises:
            BenchError: the system does not permit shaping.
        """
        self.link = link
        self._traces = [folder / f"{link}-{side}.trace" for side in ("source", "sink")]
        python = Path(sys.executable)
        if link == "shaped":
            python = stack.enter_context(shaped_python(rate, folder))
        self._source, self._sink = (Peer(f"{link} {side}", "wire_muser.py", python, 1) for side in ("source", "sink"))
        stack.callback(self._source.close)
        stack.callback(self._sink.close)
        paced = rate if link == "paced" else 0.0
        address = self._source.call("source", shape=SHAPE, max_rate=paced, trace=str(self._traces[0]))["address"]
        self._sink.call("sink", address=address, shape=SHAPE, trace=str(self._traces[1]))

    def handoff(self, chunks: int, chunk_s: float) -> float:
        """Return the time from the start of the computation to the verified seal, in seconds."""
        time.sleep(PAUSE_S)
        for trace in self._traces:
            trace.write_text("")
        self._source.call("compute", chunk_s=chunk_s)
        sealed_ns = self._sink.call("traced", prompt_tokens=chunks * SHAPE["chunk_tokens"] + 1)["sealed_ns"]
        started_ns = min(int(span["start_ns"]) for span in self.spans() if span["kind"] == "compute")
        return (int(sealed_ns) - started_ns) / 1e9

    def spans(self) -> list[Span]:
        """Return what both sides traced of the last handoff."""
        return [json.loads(line) for trace in self._traces for line in trace.read_text().splitlines()]


@contextmanager
def shaped_python(rate: float, folder: Path) -> Iterator[Path]:
    """A Python that runs where loopback carries `rate` bytes a second: in a network namespace of its own.

    Raises:
        BenchError: namespaces or traffic control are not permitted, or the tools are missing.
    """
    name = f"muser-bench-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    shape = f"tc qdisc add dev lo root tbf rate {rate * 8:.0f} burst 128kb latency 100ms".split()
    try:
        system(["ip", "netns", "add", name])
    except OSError as error:
        raise BenchError(f"no network namespaces: {error}") from error
    try:
        system([*inside, "ip", "link", "set", "lo", "up"])
        system([*inside, *shape])
        script = folder / "shaped-python"
        script.write_text(f'#!/bin/sh\nexec {" ".join(inside)} "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        yield script
    finally:
        system(["ip", "netns", "delete", name])


def system(command: Sequence[str]) -> None:
    """Run a tool of the system.

    Raises:
        BenchError: it failed; the message is its own.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: {done.stderr.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="bench.overlap", description=__doc__)
    add_arguments(parser)
    try:
        return 0 if run(parser.parse_args(argv)) else 1
    except BenchError as error:
        print(f"bench.overlap: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
