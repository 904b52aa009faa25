"""Prefill speed on this machine's CPU: the producer against transformers and llama.cpp, same weights, same threads.

`python -m bench.prefill --help` lists the options. The result is refused when the planes are not those of the peer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.driver import (
    BenchError,
    Goal,
    Peer,
    PeerUnavailable,
    Samples,
    add_run_arguments,
    interleave,
    judge,
    machine,
    peer_python,
    table,
    write_result,
)
from bench.weights import reencode
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.gguf import is_gguf
from muser_wire.model.hf_folder import write_folder
from muser_wire.model.spec import ModelSpec
from muser_wire.numerics import budget

TRANSFORMERS_REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0")
LLAMACPP_REQUIREMENTS = ("llama-cpp-python==0.3.36",)

GOAL_TRANSFORMERS = 1.2
GOAL_LLAMACPP = 1.0
"""How many times as fast as each peer this shall be."""
REENCODED = ("Q4_0", "Q8_0", "BF16")
OURS = "muser bf16"
TRANSFORMERS = "transformers bf16"
LLAMACPP = "llama.cpp "

MIN_LOGIT_CORRELATION = 0.99
"""Between llama.cpp's last logits on bf16 weights and transformers': below it they do not run the same model."""


@dataclass(frozen=True)
class Options:
    """One run, as the command line describes it."""

    model: Path
    tokens: tuple[int, ...]
    rounds: int
    threads: int
    venv: Path
    llamacpp: bool
    out: Path | None

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="bench.prefill", description=__doc__)
        parser.add_argument("--model", default="smollm2", help="a fetched model's name, a GGUF file or a folder")
        parser.add_argument("--tokens", default="128,512,2048", help="prompt lengths")
        parser.add_argument("--rounds", type=int, default=7, help="measurements of each contestant at each length")
        parser.add_argument("--no-llamacpp", action="store_true", help="leave llama.cpp out: it takes most of the time")
        add_run_arguments(parser)
        args = parser.parse_args(argv)
        return cls(
            model=fetched_path(args.model, muser_home()),
            tokens=tuple(int(count) for count in args.tokens.split(",")),
            rounds=args.rounds,
            threads=args.threads,
            venv=args.venv,
            llamacpp=not args.no_llamacpp,
            out=args.out,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    try:
        options = Options.parse(argv)
        with ExitStack() as stack:
            return judge(run(options, stack))
    except (BenchError, WireError) as error:
        print(f"bench.prefill: {error}", file=sys.stderr)
        return 1


def run(options: Options, stack: ExitStack) -> list[Goal]:
    """Start every contestant, check that they compute the same, measure, print; return what shall hold."""
    host = machine()
    work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    checkpoint = open_checkpoint(options.model)
    contestants = Contestants(options, checkpoint, work, stack)
    contestants.start()
    prompts = {count: prompt(checkpoint.spec, count) for count in options.tokens}
    checks = {count: check(contestants.peers, ids, work) for count, ids in prompts.items()}
    samples = {count: interleave(contestants.peers, options.rounds, timed(ids)) for count, ids in prompts.items()}
    report(checkpoint.spec, samples, checks)
    if options.out is not None:
        write_result(
            options.out,
            host,
            unit="seconds a prompt",
            model=options.model.name,
            threads=options.threads,
            contestants=contestants.facts,
            checks=checks,
            samples=samples,
            ratios={count: ratios(case) for count, case in samples.items()},
        )
    return [goal for count, case in samples.items() for goal in goals(count, case, options)]


def goals(count: int, case: Samples, options: Options) -> list[Goal]:
    """Return the goals at one prompt length; llama.cpp counts with its fastest encoding."""
    faster = ratios(case)
    found = [Goal(f"{count} tokens, times as fast as {TRANSFORMERS}", GOAL_TRANSFORMERS, faster[TRANSFORMERS])]
    if options.llamacpp:
        encodings = [ratio for name, ratio in faster.items() if name.startswith(LLAMACPP)]
        best = min(encodings, default=None)
        found.append(Goal(f"{count} tokens, times as fast as llama.cpp's best", GOAL_LLAMACPP, best))
    return found


class Contestants:
    """The processes that compete. `peers` lists ours first; `facts` is what each said of itself."""

    def __init__(self, options: Options, checkpoint: Checkpoint, work: Path, stack: ExitStack) -> None:
        self._options = options
        self._checkpoint = checkpoint
        self._work = work
        self._stack = stack
        self.peers: list[Peer] = []
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Start all. Without llama.cpp the run goes on; transformers is needed for the check."""
        self._add(OURS, "ours_prefill.py", Path(sys.executable), model=str(self._options.model.absolute()))
        python = peer_python(self._options.venv, TRANSFORMERS_REQUIREMENTS)
        write_folder(self._checkpoint, self._work / "folder")
        self._add(TRANSFORMERS, "transformers_prefill.py", python, folder=str(self._work / "folder"))
        if not self._options.llamacpp:
            return
        try:
            self._start_llamacpp()
        except PeerUnavailable as error:
            print(f"llama.cpp is not measured: {error}", file=sys.stderr)

    def _start_llamacpp(self) -> None:
        model = self._options.model.absolute()
        if model.is_dir() or not is_gguf(model):
            raise PeerUnavailable("the model is not a GGUF file")
        python = peer_python(self._options.venv, LLAMACPP_REQUIREMENTS)
        files = {f"{self._checkpoint.encoding} as given": model}
        for encoding in REENCODED:
            files[encoding] = self._work / f"{encoding}.gguf"
            reencode(model, files[encoding], encoding)
        for name, file in files.items():
            self._add(
                LLAMACPP + name, "llamacpp_prefill.py", python, model=str(file), context=max(self._options.tokens)
            )

    def _add(self, name: str, script: str, python: Path, **load: Any) -> None:
        print(f"loading {name}", file=sys.stderr)
        peer = Peer(name, script, python, self._options.threads)
        self._stack.callback(peer.close)
        self.facts[name] = peer.call("load", threads=self._options.threads, **load)
        self.peers.append(peer)


def prompt(spec: ModelSpec, tokens: int) -> list[int]:
    """Return random token ids, the same for each contestant: what they are does not change the work."""
    ids: list[int] = np.random.default_rng(tokens).integers(0, spec.vocab_size, tokens).tolist()
    return ids


def timed(ids: list[int]) -> Callable[[Peer], float]:
    """Return what measures one prefill of a prompt, in seconds by the contestant's own clock."""
    return lambda peer: float(peer.call("prefill", ids=ids)["seconds"])


def check(peers: Sequence[Peer], ids: list[int], work: Path) -> dict[str, float]:
    """Return how far the contestants are from one another on this prompt.

    Raises:
        BenchError: they do not compute the same function; no time of theirs means anything.
    """
    by_name = {peer.name: peer for peer in peers}
    ours, theirs = (ask(by_name[name], "planes", ids, work) for name in (OURS, TRANSFORMERS))
    # A cache may have forgotten what left the window.
    ours = ours[:, -theirs.shape[1] :]
    distance = float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))
    limit = budget("planes_bf16")
    if not distance <= limit:
        raise BenchError(f"last planes are {distance:.3f} of their size from transformers', allowed are {limit}")
    result = {"planes_relative_rms": distance}
    bf16 = by_name.get(LLAMACPP + "BF16")
    if bf16 is not None:
        theirs, reference = (ask(peer, "logits", ids, work) for peer in (bf16, by_name[TRANSFORMERS]))
        result["llamacpp_logit_correlation"] = float(np.corrcoef(theirs, reference)[0, 1])
        if not result["llamacpp_logit_correlation"] >= MIN_LOGIT_CORRELATION:
            raise BenchError(f"llama.cpp's logits are not transformers': {result}")
    return result


def ask(peer: Peer, op: str, ids: list[int], work: Path) -> NDArray[np.float64]:
    """Return an array that a contestant computes for a prompt."""
    file = work / "answer.npy"
    peer.call(op, ids=ids, out=str(file))
    values: NDArray[np.float32] = np.load(file)
    return values.astype(np.float64)


def ratios(samples: Samples) -> dict[str, float]:
    """Return how many times as fast as each peer we are."""
    return {name: samples.ratio(name, OURS) for name in samples.by_name if name != OURS}


def report(spec: ModelSpec, samples: dict[int, Samples], checks: dict[int, dict[str, float]]) -> None:
    """Print tokens a second by median, our ratio to each peer, and what the comparison leaves out."""
    names = list(next(iter(samples.values())).by_name)
    rows = []
    for name in names:
        speeds = [f"{count / case.median(name):.0f}" for count, case in samples.items()]
        faster = ["" if name == OURS else f"{case.ratio(name, OURS):.2f}x" for case in samples.values()]
        rows.append([name, *speeds, *faster])
    header = ["tokens a second at", *map(str, samples), *(f"ours, {count}" for count in samples)]
    print(table(header, rows))
    worst = max(found["planes_relative_rms"] for found in checks.values())
    print(f"""
Last layer's planes differ from transformers' by {worst:.3f} of their size (rms; both bf16).
Ours is what a handoff needs, the planes of every layer. It leaves out the last layer's attention and MLP
({skipped(spec):.1%} of the products) and the head; peers compute them and the last position's logits.""")


def skipped(spec: ModelSpec) -> float:
    """Return the share of a token's weight products, without the head, that no key or value depends on."""
    attention = (3 if spec.attention_gate else 2) * spec.heads * spec.head_dim * spec.hidden_size
    after = attention + 3 * spec.ffn_size * spec.hidden_size
    layer = after + 2 * spec.kv_heads * spec.head_dim * spec.hidden_size
    return after / (layer * len(spec.layers))


if __name__ == "__main__":
    sys.exit(main())
