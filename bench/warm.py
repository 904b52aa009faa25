"""Time to the first token of warm prompts: chats and questions on documents, cold and warm, beside peers.

`python -m bench.warm --help` lists the options. Prompts are token ids and the same for everyone; replies in a chat
are those of the product without a cache. mlx-lm answers with the prompt cache of its server, llama.cpp goes on from
its context's longest common prefix, as its server does with one slot. One chat is also put to the
servers over HTTP: this node's, mlx-lm's, llama-cpp-python's and llama-server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import conversations, servers
from bench.conversations import CHUNK_TOKENS, COLD, QUESTIONS, USER_TOKENS, Document, Scenario, words
from bench.decode import write_folder
from bench.driver import BenchError, Peer, PeerUnavailable, add_run_arguments, machine, peer_python, table, write_result
from bench.llama_build import built_llama_server
from muser_wire.errors import WireError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.home import muser_home
from muser_wire.kvpack.block import payload_nbytes
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.model.tokenizer import load_tokenizer

MLX_LM_REQUIREMENTS = ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2") if sys.platform == "linux" else ("mlx-lm==0.32.2",)
LLAMACPP_RELEASE = "llama-cpp-python==0.3.36"
LLAMACPP_REQUIREMENTS = (LLAMACPP_RELEASE.replace("==", "[server]=="),)
WARM, MLX_LM, LLAMACPP = "muser warm", "mlx-lm", "llama.cpp"
LLAMACPP_WINDOW = "llama.cpp, rows of windows alone"
"""Its library keeps every row of sliding layers; its server what their windows need, and a few checkpoints, which this
contestant lacks."""

CONTEXT_TOKENS = 4096
MEMORY_MB = 2000
AGAIN = 6
"""How often one prompt is asked again whose 2,048 leading tokens are in memory."""

SAVED_TOKENS, SAVED_PROMPTS, SAVED_REPLY = 1000, 2, 40
"""What is saved while its answer is decoded: some 23 MB, a slab between every two tokens."""

WINDOW, LONG_TOKENS, WINDOW_TURNS = 256, 1024, 4
SLIDING = f"window of {WINDOW}"
HELD_GOAL = 0.5
"""Least share of the later prompts that is held where they are longer than the window."""

WARM_GOAL = 0.08
"""Most that a warm first token may take of a cold one when 2,048 tokens are held."""

COPY_GOAL = 1.5
"""Most that it may take when all but one are held in memory, of one decoded token and one copy of what is held."""

STEP_GOAL_S = 0.005
"""Most that saving may delay a token, in seconds: the slowest twentieth is compared."""


@dataclass(frozen=True)
class Options:
    """One run, as the command line describes it."""

    model: Path
    system_tokens: int
    turns: int
    reply_tokens: int
    threads: int
    peers: bool
    venv: Path
    llama_server: Path | None
    out: Path | None

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="bench.warm", description=__doc__)
        parser.add_argument("--model", type=Path, help="GGUF file; without it the fetched smollm2")
        parser.add_argument("--system-tokens", type=int, default=2000, help="tokens that each chat begins with")
        parser.add_argument("--turns", type=int, default=10, help="turns of a chat")
        parser.add_argument("--reply-tokens", type=int, default=12, help="tokens of each reply")
        parser.add_argument("--no-peers", action="store_true", help="only the product, cold and warm")
        parser.add_argument("--llama-server", type=Path, help="its binary; without it one is compiled once")
        add_run_arguments(parser)
        args = parser.parse_args(argv)
        return cls(
            model=args.model or fetched_path("smollm2", muser_home()),
            system_tokens=args.system_tokens,
            turns=args.turns,
            reply_tokens=args.reply_tokens,
            threads=args.threads,
            peers=not args.no_peers,
            venv=args.venv,
            llama_server=args.llama_server,
            out=args.out,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    options = Options.parse(argv)
    try:
        with ExitStack() as stack:
            return Bench(options, stack).run()
    except (BenchError, WireError) as error:
        print(f"bench.warm: {error}", file=sys.stderr)
        return 1


@dataclass(frozen=True)
class Again:
    """One prompt with 2,048 tokens in memory, asked again: times in seconds, medians."""

    first_s: float
    step_s: float
    copy_s: float

    @property
    def ratio(self) -> float:
        """The first token's time, of one decoded token and one copy."""
        return self.first_s / (self.step_s + self.copy_s)


@dataclass(frozen=True)
class Delay:
    """How much later tokens come while a prompt is saved, in seconds: the median, and the slowest twentieth."""

    median_s: float
    slow_s: float


class Bench:
    """One run: contestants that wait while another one answers."""

    def __init__(self, options: Options, stack: ExitStack) -> None:
        self._options, self._stack = options, stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._tokenizer = load_tokenizer(options.model)
        self._pythons = self._peers()

    def run(self) -> int:
        """Run every scenario with every contestant, print, judge; return 1 when a goal was missed."""
        host = machine()
        scenarios = self._conversations()
        again, delay = self._again(), self._delay()
        scenarios += [self._restart(scenarios[0]), *self._sliding()]
        served = self._served()
        report(scenarios)
        report_served(served)
        if self._options.out is not None:
            cases = {s.name: {"lengths": list(map(len, s.prompts)), "answers": s.answers} for s in scenarios}
            own = {"again": vars(again), "delay": vars(delay), "served": {s.name: s.answers for s in served}}
            write_result(
                self._options.out, host, unit="seconds", model=self._options.model.name, scenarios=cases, **own
            )
        return judge(scenarios, again, delay)

    def _peers(self) -> dict[str, Path]:
        """Return the Python of each peer that can be installed here."""
        if not self._options.peers:
            return {}
        pythons: dict[str, Path] = {}
        for name, requirements in ((MLX_LM, MLX_LM_REQUIREMENTS), (LLAMACPP, LLAMACPP_REQUIREMENTS)):
            try:
                pythons[name] = peer_python(self._options.venv, requirements)
            except PeerUnavailable as error:
                print(f"bench.warm: {error}; going on without", file=sys.stderr)
        if MLX_LM in pythons:
            (self._folder / "hf").mkdir()
            write_folder(open_checkpoint(self._options.model), self._folder / "hf")
            servers.write_tokenizer(self._tokenizer, self._folder / "hf")
        return pythons

    def _llama_server(self) -> Path | None:
        """Return llama.cpp's own server, where it is wanted and can be had."""
        options = self._options
        if not options.peers:
            return None
        try:
            return options.llama_server or built_llama_server(options.venv, LLAMACPP_RELEASE)
        except PeerUnavailable as error:
            print(f"bench.warm: no llama-server: {error}; going on without", file=sys.stderr)
            return None

    def _conversations(self) -> list[Scenario]:
        """Play chats and questions; a peer is started when the one before has ended."""
        options, turns = self._options, self._options.turns
        self._cold, self._warm = self._ours(COLD), self._ours(WARM)
        ask = partial(self._ask, self._cold)
        scenarios = [
            conversations.chat(self._tokenizer, ask, options.system_tokens, turns),
            conversations.alternating(self._tokenizer, ask, options.system_tokens, max(2, turns // 5)),
            conversations.document(self._tokenizer, ask, Document()),
        ]
        peers = {WARM: lambda: self._warm, MLX_LM: self._mlx_lm, LLAMACPP: self._llamacpp}
        for name, start in peers.items():
            if name == WARM or name in self._pythons:
                peer = start()
                for scenario in scenarios:
                    scenario.answers[name] = [self._ask(peer, prompt) for prompt in scenario.prompts]
                if name != WARM:
                    peer.close()
        return scenarios

    def _ask(self, peer: Peer, prompt: list[int], tokens: int | None = None) -> dict[str, Any]:
        return peer.call("ask", ids=prompt, tokens=tokens or self._options.reply_tokens)

    def _ours(self, name: str, model: Path | None = None, directory: str = "kvpack", chunk: int = CHUNK_TOKENS) -> Peer:
        """Start the product; a warm one keeps prompts in memory and on disk."""
        kept_mb = 0 if name == COLD else MEMORY_MB
        load = {"model": str((model or self._options.model).absolute()), "chunk": chunk}
        sizes = {"memory_mb": kept_mb, "disk_mb": kept_mb, "directory": str(self._folder / directory)}
        return self._started(name, "ours_warm.py", Path(sys.executable), **load, **sizes)

    def _mlx_lm(self, folder: Path | None = None) -> Peer:
        return self._started(MLX_LM, "mlxlm_warm.py", self._pythons[MLX_LM], folder=str(folder or self._folder / "hf"))

    def _llamacpp(self, model: Path | None = None, name: str = LLAMACPP) -> Peer:
        load = {"model": str((model or self._options.model).absolute()), "context": CONTEXT_TOKENS}
        sizes = {"threads": self._options.threads, "swa_full": name == LLAMACPP}
        return self._started(name, "llamacpp_warm.py", self._pythons[LLAMACPP], **load, **sizes)

    def _started(self, name: str, script: str, python: Path, **load: Any) -> Peer:
        """Return a contestant that has loaded its model."""
        print(f"{name} starts", file=sys.stderr)
        peer = Peer(name, script, python, self._options.threads)
        self._stack.callback(peer.close)
        peer.call("load", **load)
        return peer

    def _again(self) -> Again:
        """Measure one prompt whose 2,048 leading tokens are in memory; one answer before does not count."""
        prompt = words(self._tokenizer, CHUNK_TOKENS + 1, "document")
        nbytes = payload_nbytes(
            Geometry.of(open_checkpoint(self._options.model).spec, ElementType.F16), 0, CHUNK_TOKENS
        )
        self._ask(self._warm, prompt)
        answers = [self._ask(self._warm, prompt) for _ in range(AGAIN)]
        if any(answer["cached"] != CHUNK_TOKENS for answer in answers):
            raise BenchError(f"{answers[-1]['cached']} of {CHUNK_TOKENS} tokens were held")
        return Again(
            first_s=statistics.median(answer["first_s"] for answer in answers),
            step_s=statistics.median(step for answer in answers for step in answer["steps_s"]),
            copy_s=self._warm.call("copy", nbytes=nbytes)["copy_s"],
        )

    def _delay(self) -> Delay:
        """Compare the steps of answers whose prompts are saved meanwhile with those of a node that saves nothing."""
        steps: dict[str, list[float]] = {COLD: [], WARM: []}
        for index in range(SAVED_PROMPTS):
            prompt = words(self._tokenizer, SAVED_TOKENS, f"saved {index}")
            for peer in (self._cold, self._warm):
                steps[peer.name] += self._ask(peer, prompt, SAVED_REPLY)["steps_s"]
        slow = {name: statistics.quantiles(times, n=20)[-1] for name, times in steps.items()}
        return Delay(statistics.median(steps[WARM]) - statistics.median(steps[COLD]), slow[WARM] - slow[COLD])

    def _restart(self, asked: Scenario) -> Scenario:
        """The last prompt of a chat after a restart: all that is held comes from disk."""
        scenario = Scenario("after a restart, from disk", 0, prompts=[asked.prompts[-1]])
        scenario.answers[COLD] = [asked.answers[COLD][-1]]
        self._warm.call("close")
        self._warm.close()
        peer = self._ours(WARM)
        scenario.answers[WARM] = [self._ask(peer, asked.prompts[-1])]
        return scenario

    def _sliding(self) -> list[Scenario]:
        """A chat, and questions on a document, longer than the window of a model with sliding layers: a random one.

        Short questions first, then such that are longer than the window themselves.
        """
        model = self._folder / "sliding"
        write_tiny("gemma3", model, layers=12, hidden=256, ffn=512, window=WINDOW, max_positions=CONTEXT_TOKENS)
        tokenizer = load_tokenizer(model)
        cold, warm = (self._ours(name, model, "sliding-cache", WINDOW) for name in (COLD, WARM))
        short = Document(SLIDING, 8 * WINDOW, 3)
        long = Document(f"{SLIDING}, questions of {LONG_TOKENS}", 5 * WINDOW, 3, LONG_TOKENS)
        ask = partial(self._ask, cold)
        scenarios = [conversations.chat(tokenizer, ask, 8 * WINDOW, WINDOW_TURNS, f"{SLIDING}, ")]
        scenarios += [conversations.document(tokenizer, ask, asked) for asked in (short, long)]
        peers = [warm]
        if MLX_LM in self._pythons:
            peers.append(self._mlx_lm(model))
        if LLAMACPP in self._pythons:
            write_tiny_gguf(self._folder / "sliding.gguf", model)
            peers += [self._llamacpp(self._folder / "sliding.gguf", name) for name in (LLAMACPP, LLAMACPP_WINDOW)]
        for peer in peers:
            for scenario in scenarios:
                scenario.answers[peer.name] = [self._ask(peer, prompt) for prompt in scenario.prompts]
        return scenarios

    def _served(self) -> list[servers.Server]:
        """Put one chat to each server over HTTP."""
        options, folder = self._options, self._folder
        contestants = [servers.muser(options.model, folder, options.threads)]
        if MLX_LM in self._pythons:
            contestants.append(servers.mlx_lm(self._pythons[MLX_LM], folder / "hf", folder, options.threads))
        if LLAMACPP in self._pythons:
            python = self._pythons[LLAMACPP]
            contestants.append(servers.llamacpp(python, options.model, folder, options.threads, CONTEXT_TOKENS))
        if (binary := self._llama_server()) is not None:
            contestants.append(servers.llama_server(binary, options.model, folder, options.threads, CONTEXT_TOKENS))
        for server in contestants:
            self._stack.callback(server.close)
        talk = servers.Talk(self._tokenizer, options.system_tokens, options.turns, options.reply_tokens)
        servers.converse(contestants, talk)
        return contestants


def report(scenarios: Sequence[Scenario]) -> None:
    """Print medians over the prompts that should be warm, and how much of them was held."""
    rows = []
    for scenario in scenarios:
        cold_s = scenario.median_s(COLD)
        for name in scenario.answers:
            first_s = scenario.median_s(name)
            share = f"{scenario.cached_share(name):.0%}"
            rows.append([f"{scenario.name}: {name}", f"{first_s * 1e3:.1f}", f"{first_s / cold_s:.3f}", share])
    print(table(["", "first token, ms", "of muser cold", "of the prompt held"], rows))


def report_served(contestants: Sequence[servers.Server]) -> None:
    """Print each server's first turn, which is cold, and the medians of the later ones."""
    rows = []
    # Not every server says how long its prompts were.
    prompt_tokens = sum(answer["prompt"] for answer in contestants[0].answers[1:])
    for server in contestants:
        cold, *later = server.answers
        first_ms = statistics.median(answer["first_s"] for answer in later) * 1e3
        cached = sum(answer["cached"] for answer in later) / max(1, prompt_tokens)
        rows.append([server.name, f"{cold['first_s'] * 1e3:.0f}", f"{first_ms:.1f}", f"{cached:.0%}"])
    print(table(["one chat over HTTP", "first turn, ms", "later turns, ms", "of the prompts cached"], rows))


def judge(scenarios: Sequence[Scenario], again: Again, delay: Delay) -> int:
    """Compare with the goals; print and return 1 for a miss."""
    missed = []
    asked = next(scenario for scenario in scenarios if scenario.name.startswith("document"))
    ratio = asked.median_s(WARM) / asked.median_s(COLD)
    print(f"{QUESTIONS} questions of {USER_TOKENS} tokens on {CHUNK_TOKENS}: warm is {ratio:.1%} of cold")
    if ratio > WARM_GOAL:
        missed.append(f"warm takes {ratio:.1%} of cold with {CHUNK_TOKENS} tokens held; the goal is {WARM_GOAL:.0%}")
    print(
        f"all but one token in memory: {again.first_s * 1e3:.1f} ms, {again.ratio:.2f} times a decoded token "
        f"({again.step_s * 1e3:.1f} ms) and a copy ({again.copy_s * 1e3:.1f} ms)"
    )
    if again.ratio > COPY_GOAL:
        missed.append(f"that is {again.ratio:.2f} times; the goal is {COPY_GOAL}")
    for scenario in scenarios:
        here = [warm["tokens"] == cold["tokens"] for warm, cold in pairs(scenario)]
        print(f"{scenario.name}: {sum(here)} of {len(here)} warm answers have the tokens of the cold ones")
        if not all(here):
            missed.append(f"{scenario.name}: a warm answer differs from the cold one")
        share = scenario.cached_share(WARM)
        if scenario.name.startswith(SLIDING) and share < HELD_GOAL:
            missed.append(f"{scenario.name}: {share:.0%} of the prompts was held; the goal is {HELD_GOAL:.0%}")
    print(
        f"saving delays a token by {delay.median_s * 1e3:+.2f} ms, the slowest twentieth by {delay.slow_s * 1e3:+.2f}"
    )
    if delay.slow_s > STEP_GOAL_S:
        missed.append(f"saving delays tokens by {delay.slow_s * 1e3:.1f} ms; the goal is {STEP_GOAL_S * 1e3:.0f}")
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def pairs(scenario: Scenario) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the product's warm and cold answers to each prompt."""
    return list(zip(scenario.answers[WARM], scenario.answers[COLD], strict=True))


if __name__ == "__main__":
    sys.exit(main())
