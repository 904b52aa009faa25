"""The tail of a handoff: from the end of the producer's last layer to the consumer's last commit.

Both nodes run as a user runs them, on the real model; the spans that they write say where the time went.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.driver import ROOT, BenchError, machine, table, write_result
from muser_wire.cli.ask import Answer, Endpoint
from muser_wire.cli.nodes import Pair, PairOptions
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path

SENTENCES = 83
PROMPT_TOKENS = range(1950, 2049)
"""What that many sentences come to: one whole chunk, the worst case for a tail, since a chunk is committed at once."""

GOAL = 0.05
"""The tail is to stay under this part of the prefill time."""

START_S = 180.0
SENTENCE = "The reader works through the text and the writer gives the answer, word by word, number {}. "


@dataclass(frozen=True)
class Measured:
    """One handoff. Times in seconds."""

    prompt_tokens: int
    prefill_s: float
    tail_s: float
    wire_nbytes: int

    @property
    def ratio(self) -> float:
        """The tail as a part of the prefill."""
        return self.tail_s / self.prefill_s


class TracedPair(Pair):
    """Both nodes with a trace file each; the producer computes in bf16, the consumer in f32 over bf16 planes."""

    def _prefill_command(self) -> list[str]:
        trace = str(self.options.folder / "prefill.trace")
        return [*super()._prefill_command(), "--dtype", "bf16", "--kv", "bf16", "--trace", trace]

    def _decode_command(self) -> list[str]:
        trace = str(self.options.folder / "decode.trace")
        return [*super()._decode_command(), "--dtype", "f32", "--kv", "bf16", "--trace", trace]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write the result; return 0 when the goal was met."""
    parser = argparse.ArgumentParser(prog="python -m bench handoff", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "handoff.json")
    arguments = parser.parse_args(argv)
    host = machine()
    measured = measure(arguments.rounds)
    ratio = statistics.median(one.ratio for one in measured)
    rows = [
        [str(one.prompt_tokens), f"{one.prefill_s:.3f}", f"{one.tail_s * 1e3:.1f}", f"{one.ratio:.2%}"]
        for one in measured
    ]
    print(table(["prompt tokens", "prefill s", "tail ms", "tail / prefill"], rows))
    print(f"median {ratio:.2%} of the prefill time; goal: under {GOAL:.0%}")
    write_result(arguments.out, host, samples=[asdict(one) for one in measured], median_ratio=ratio, goal=GOAL)
    return 0 if ratio < GOAL else 1


def measure(rounds: int) -> list[Measured]:
    """Return one measurement for each of `rounds` handoffs; one before them does not count.

    Raises:
        BenchError: an answer did not come the remote way, whole.
    """
    model = fetched_path("smollm2", muser_home())
    with tempfile.TemporaryDirectory(prefix="muser-bench-") as folder:
        options = PairOptions(model, Path(folder), start_timeout_s=START_S, route="remote", cache_memory_mb=0)
        pair = TracedPair(options, piped=False)
        try:
            pair.start(lambda node: None)
            return [one_handoff(pair, index) for index in range(rounds + 1)][1:]
        finally:
            pair.stop()


def one_handoff(pair: Pair, index: int) -> Measured:
    """Ask one question of one whole chunk, and read what the nodes traced of it."""
    traces = [pair.options.folder / f"{name}.trace" for name in ("prefill", "decode")]
    for trace in traces:
        if trace.exists():
            trace.write_text("")
    text = "".join(SENTENCE.format((index + 1) * 1000 + number) for number in range(SENTENCES))
    answer = Endpoint(pair.decode.ports["port"]).ask(text, 1, lambda piece: None)
    return evaluate(answer, [json.loads(line) for trace in traces for line in trace.read_text().splitlines()])


def evaluate(answer: Answer, spans: Sequence[dict[str, int | str]]) -> Measured:
    """Return what the spans of one handoff say.

    Raises:
        BenchError: the prompt was not prefilled remotely, so there is nothing to measure.
    """
    if answer.route != "remote":
        raise BenchError(f"the prompt came by way of {answer.route!r}: {answer.reason}")
    prompt_tokens = int(str(answer.usage["prompt_tokens"]))
    if prompt_tokens not in PROMPT_TOKENS:
        raise BenchError(f"the prompt has {prompt_tokens} tokens, {PROMPT_TOKENS} were wanted")
    times = {
        kind: [(int(span["start_ns"]), int(span["stop_ns"])) for span in spans if span["kind"] == kind]
        for kind in ("compute", "commit")
    }
    computed_ns = max(stop for _, stop in times["compute"])
    return Measured(
        prompt_tokens=prompt_tokens,
        prefill_s=(computed_ns - min(start for start, _ in times["compute"])) / 1e9,
        tail_s=(max(stop for _, stop in times["commit"]) - computed_ns) / 1e9,
        wire_nbytes=int(str(answer.account["payload_bytes"])),
    )


if __name__ == "__main__":
    sys.exit(main())
