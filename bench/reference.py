"""Speed of the reference lane on this machine's CPU, beside the native lane and llama.cpp over the same file.

Prefill is the producer's, against native bf16; decode the consumer's, against native f32. Same weights, same threads,
rounds that interleave. `python -m bench.reference --help` lists the options.
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

from bench.decode import prompt as text_prompt
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
from bench.prefill import LLAMACPP_REQUIREMENTS, ask, prompt, timed
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.numerics import Lane, budget

REFERENCE, NATIVE, LLAMACPP = "muser reference", "muser native", "llama.cpp"
GOAL_TOKENS = 512
"""The prompt length that the goals are about."""
GOAL_PREFILL, GOAL_LLAMACPP, GOAL_DECODE = 0.5, 1.0, 0.7


@dataclass(frozen=True)
class Options:
    """One run, as the command line describes it."""

    model: Path
    tokens: tuple[int, ...]
    decoded: int
    rounds: int
    threads: int
    venv: Path
    llamacpp: bool
    out: Path | None

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="bench.reference", description=__doc__)
        parser.add_argument("--model", default="smollm2", help="a fetched model's name, or a GGUF file")
        parser.add_argument("--tokens", default="128,512,2048", help="prompt lengths; none: leave prefill out")
        parser.add_argument("--decoded", type=int, default=32, help="tokens decoded in a round; 0: leave decode out")
        parser.add_argument("--rounds", type=int, default=7, help="measurements of each contestant at each length")
        parser.add_argument("--no-llamacpp", action="store_true", help="leave llama.cpp out")
        add_run_arguments(parser)
        args = parser.parse_args(argv)
        return cls(
            model=fetched_path(args.model, muser_home()),
            tokens=() if args.tokens == "none" else tuple(int(count) for count in args.tokens.split(",")),
            decoded=args.decoded,
            rounds=args.rounds,
            threads=args.threads,
            venv=args.venv,
            llamacpp=not args.no_llamacpp,
            out=args.out,
        )


@dataclass(frozen=True)
class Half:
    """What one half of the run, prefill or decode, came to. `samples` are by case, such as a prompt length."""

    samples: dict[int, Samples]
    facts: dict[str, Any]
    checks: dict[int, dict[str, float]]
    goals: list[Goal]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    try:
        return judge(run(Options.parse(argv)))
    except (BenchError, WireError) as error:
        print(f"bench.reference: {error}", file=sys.stderr)
        return 1


def run(options: Options) -> list[Goal]:
    """Measure both halves, one after the other; return what shall hold."""
    host = machine()
    halves = {}
    if options.tokens:
        halves["prefill"] = _alone(options, prefill)
    if options.decoded:
        halves["decode"] = _alone(options, decode)
    if options.out is not None:
        write_result(
            options.out,
            host,
            unit="seconds",
            model=options.model.name,
            threads=options.threads,
            **{
                name: {"contestants": half.facts, "checks": half.checks, "samples": half.samples}
                for name, half in halves.items()
            },
        )
    return [goal for half in halves.values() for goal in half.goals]


def _alone(options: Options, half: Callable[[Options, ExitStack], Half]) -> Half:
    with ExitStack() as stack:
        return half(options, stack)


def prefill(options: Options, stack: ExitStack) -> Half:
    """Measure prompts of every length, after a check that both lanes compute the same model."""
    peers, facts = _prefill_peers(options, stack)
    work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    spec = open_checkpoint(options.model).spec
    prompts = {count: prompt(spec, count) for count in options.tokens}
    checks = {count: {"planes_relative_rms": _distance(peers, ids, work)} for count, ids in prompts.items()}
    samples = {count: interleave(peers, options.rounds, timed(ids)) for count, ids in prompts.items()}
    _report("prefill, tokens a second at", samples)
    return Half(samples, facts, checks, _prefill_goals(samples, options))


def _prefill_peers(options: Options, stack: ExitStack) -> tuple[list[Peer], dict[str, Any]]:
    model = str(options.model.absolute())
    starts: list[tuple[str, str, Path, dict[str, Any]]] = [
        (REFERENCE, "ours_prefill.py", Path(sys.executable), {"lane": Lane.REFERENCE.value}),
        (NATIVE, "ours_prefill.py", Path(sys.executable), {"lane": Lane.NATIVE.value}),
    ]
    if options.llamacpp:
        try:
            python = peer_python(options.venv, LLAMACPP_REQUIREMENTS)
            starts.append((LLAMACPP, "llamacpp_prefill.py", python, {"context": max(options.tokens)}))
        except PeerUnavailable as error:
            print(f"llama.cpp is not measured: {error}", file=sys.stderr)
    peers, facts = [], {}
    for name, script, python, load in starts:
        print(f"loading {name}", file=sys.stderr)
        peer = Peer(name, script, python, options.threads)
        stack.callback(peer.close)
        facts[name] = peer.call("load", model=model, threads=options.threads, **load)
        peers.append(peer)
    return peers, facts


def _distance(peers: Sequence[Peer], ids: list[int], work: Path) -> float:
    """Return how far the lanes' last planes are from each other, as a share of their size.

    Raises:
        BenchError: further than bf16 explains: they do not compute the same model.
    """
    reference, native = (ask(peer, "planes", ids, work) for peer in peers[:2])
    distance = float(np.sqrt(np.mean((reference - native) ** 2) / np.mean(native**2)))
    if not distance <= budget("planes_bf16"):
        raise BenchError(f"the lanes' last planes differ by {distance:.3f} of their size")
    return distance


def _prefill_goals(samples: dict[int, Samples], options: Options) -> list[Goal]:
    case = samples.get(GOAL_TOKENS)
    if case is None:
        return []
    what = f"prefill of {GOAL_TOKENS} tokens, times as fast as"
    found = [Goal(f"{what} {NATIVE} bf16", GOAL_PREFILL, case.ratio(NATIVE, REFERENCE))]
    if options.llamacpp:
        measured = case.ratio(LLAMACPP, REFERENCE) if LLAMACPP in case.by_name else None
        found.append(Goal(f"{what} {LLAMACPP}", GOAL_LLAMACPP, measured))
    return found


def decode(options: Options, stack: ExitStack) -> Half:
    """Measure greedy decoding after a prompt of text. The lanes may choose differently where two tokens are close."""
    peers, facts = [], {}
    for name, lane in ((REFERENCE, Lane.REFERENCE), (NATIVE, Lane.NATIVE)):
        peer = Peer(name, "ours_decode.py", Path(sys.executable), options.threads)
        stack.callback(peer.close)
        facts[name] = peer.call("load", model=str(options.model.absolute()), lane=lane.value)
        peers.append(peer)
    ids = text_prompt(options.model)
    answers = [peer.call("decode", ids=ids, tokens=options.decoded)["tokens"] for peer in peers]
    agreed = sum(a == b for a, b in zip(*answers, strict=True))
    if answers[0][0] != answers[1][0]:
        raise BenchError("the lanes do not choose the same first token")
    steps = options.decoded - 1

    def seconds(peer: Peer) -> float:
        return float(peer.call("decode", ids=ids, tokens=options.decoded)["seconds"])

    samples = {steps: interleave(peers, options.rounds, seconds)}
    _report("decode, tokens a second over", samples)
    print(f"{agreed} of {options.decoded} greedy tokens are equal in both lanes")
    goal = Goal(f"decode, times as fast as {NATIVE} f32", GOAL_DECODE, samples[steps].ratio(NATIVE, REFERENCE))
    return Half(samples, facts, {steps: {"equal_tokens": agreed}}, [goal])


def _report(title: str, samples: dict[int, Samples]) -> None:
    """Print tokens a second by median, and the reference lane's speed as a share of each other's."""
    rows = []
    for name in next(iter(samples.values())).by_name:
        speeds = [f"{count / case.median(name):.0f}" for count, case in samples.items()]
        shares = ["" if name == REFERENCE else f"{case.ratio(name, REFERENCE):.2f}x" for case in samples.values()]
        rows.append([name, *speeds, *shares])
    print(table([title, *map(str, samples), *(f"reference, {count}" for count in samples)], rows))


if __name__ == "__main__":
    sys.exit(main())
