"""Several answers at once: the engine's batch against one answer, and the node against mlx-lm's server.

`python -m bench.batch --help` lists the options. The same weights in f32, the same prompts, BLAS and threads, rounds
that interleave. The engine's answers must be the same in company as alone, else the result is refused. Both servers
get the same clients, each of which asks again as soon as it is answered; a request that fails is counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.decode import REQUIREMENTS, TEXT, write_folder
from bench.driver import (
    PEERS_DIR,
    ROOT,
    BenchError,
    Goal,
    Peer,
    Samples,
    add_run_arguments,
    judge,
    machine,
    peer_python,
    table,
    thread_limits,
    write_result,
)
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.model.tokenizer_gguf import read_gguf

BATCHES = (1, 4, 8)
CLIENTS = 4
GOAL_BATCH = 2.2
"""How many times the tokens a second of one answer four at once shall give."""

GOAL_MLX_LM = 1.0
"""How many times the tokens a second of mlx-lm's server this node shall give the same clients."""

OURS, MLX_LM = "muser-decode", "mlx-lm server"
PROMPT_TOKENS = 64
START_S = 120.0
ANSWER_S = 300.0


@dataclass(frozen=True)
class Options:
    """One run, as the command line describes it."""

    model: Path
    tokens: int
    rounds: int
    requests: int
    threads: int
    peers: bool
    venv: Path
    out: Path | None

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="bench.batch", description=__doc__)
        parser.add_argument("--model", type=Path, help="GGUF file of a llama model; without it the fetched smollm2")
        parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
        parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant")
        parser.add_argument("--requests", type=int, default=2, help="requests of each client in a round")
        parser.add_argument("--no-peers", action="store_true", help="only the engine, without servers")
        add_run_arguments(parser)
        args = parser.parse_args(argv)
        model = args.model or fetched_path("smollm2", muser_home())
        return cls(model, args.tokens, args.rounds, args.requests, args.threads, not args.no_peers, args.venv, args.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    options = Options.parse(argv)
    host = machine()
    try:
        with ExitStack() as stack:
            batches = measure_engine(options, stack)
        goals = [Goal("tokens a second of 4 at once, times those of one", GOAL_BATCH, batches.ratio("4", "1"))]
        served: Served | None = None
        if options.peers:
            with ExitStack() as stack:
                served = measure_servers(options, stack)
            goals.append(
                Goal(f"tokens a second, times those of {MLX_LM}", GOAL_MLX_LM, served.rates.ratio(*served.pair))
            )
            goals.append(Goal(f"requests answered by {OURS}, of all", 1.0, served.answered(OURS)))
    except (BenchError, WireError) as error:
        print(f"bench.batch: {error}", file=sys.stderr)
        return 1
    if options.out is not None:
        kept = {} if served is None else {"servers": served.rates, "failed": served.failed}
        write_result(options.out, host, unit="tokens a second", threads=options.threads, engine=batches, **kept)
    return judge(goals)


def prompts(model: Path, count: int) -> list[list[int]]:
    """Return different prompts of PROMPT_TOKENS tokens each, out of TEXT."""
    ids = load_tokenizer(model).encode(TEXT)
    step = (len(ids) - PROMPT_TOKENS) // count
    if step < 1:
        raise BenchError(f"{count} prompts of {PROMPT_TOKENS} tokens are more than the text has in this vocabulary")
    return [ids[index * step :][:PROMPT_TOKENS] for index in range(count)]


def measure_engine(options: Options, stack: ExitStack) -> Samples:
    """Return tokens a second of batches of each size, by size; print them.

    Raises:
        BenchError: an answer in company is not the answer alone.
    """
    peer = Peer("engine", "ours_batch.py", Path(sys.executable), options.threads)
    stack.callback(peer.close)
    peer.call("load", model=str(options.model.absolute()))
    asked = prompts(options.model, max(BATCHES))
    alone = [peer.call("decode", prompts=[ids], tokens=options.tokens)["tokens"][0] for ids in asked]
    rates: dict[str, list[float]] = {str(size): [] for size in BATCHES}
    busy: dict[str, list[float]] = {str(size): [] for size in BATCHES}
    for _ in range(options.rounds):
        for size in BATCHES:
            answer = peer.call("decode", prompts=asked[:size], tokens=options.tokens)
            if answer["tokens"] != alone[:size]:
                raise BenchError(f"answers of {size} at once differ from those alone")
            count = size * (options.tokens - 1)
            rates[str(size)].append(count / answer["seconds"])
            busy[str(size)].append(count / answer["cpu_seconds"])
    samples, cpu = (Samples({name: tuple(values) for name, values in each.items()}) for each in (rates, busy))
    rows = [
        [name, f"{samples.median(name):.1f}", f"{samples.ratio(name, '1'):.2f}x", f"{cpu.ratio(name, '1'):.2f}x"]
        for name in rates
    ]
    print(table(["answers at once", "tokens a second", "of one", "the same by processor time"], rows))
    return samples


@dataclass
class Server:
    """One server under load."""

    name: str
    port: int
    body: dict[str, Any] = field(default_factory=dict)

    def ask(self, prompt: str, tokens: int) -> int | None:
        """Return how many tokens a greedy answer had; None when the request failed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        body = {"model": "muser", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **self.body}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            return int(answer["usage"]["completion_tokens"]) if response.status == http.client.OK else None
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@dataclass(frozen=True)
class Served:
    """Tokens a second of both servers, and of how many requests each failed how many."""

    rates: Samples
    failed: dict[str, int]
    requests: int
    pair: tuple[str, str] = (OURS, MLX_LM)

    def answered(self, name: str) -> float:
        """Return which share of its requests a server answered."""
        return 1.0 - self.failed[name] / self.requests


def measure_servers(options: Options, stack: ExitStack) -> Served:
    """Return what both servers gave the same clients, in turn; print it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = [start_ours(options, folder, stack), start_mlx_lm(options, folder, stack)]
    tokenizer = load_tokenizer(options.model)
    texts = [tokenizer.decode(ids) for ids in prompts(options.model, CLIENTS)]
    rates: dict[str, list[float]] = {server.name: [] for server in servers}
    failed = dict.fromkeys(rates, 0)
    for counted in (False, *[True] * options.rounds):
        for server in servers:
            answers, seconds = load(server, texts, options)
            if counted:
                rates[server.name].append(sum(answer or 0 for answer in answers) / seconds)
                failed[server.name] += answers.count(None)
    served = Served(
        Samples({name: tuple(values) for name, values in rates.items()}),
        failed,
        options.rounds * options.requests * CLIENTS,
    )
    rows = [
        [name, f"{served.rates.median(name):.1f}", f"{served.rates.ratio(name, MLX_LM):.2f}x", str(failed[name])]
        for name in rates
    ]
    print(table([f"{CLIENTS} clients", "tokens a second", f"of {MLX_LM}", "failed"], rows))
    return served


def load(server: Server, texts: Sequence[str], options: Options) -> tuple[list[int | None], float]:
    """Have one client for each text ask `options.requests` times; return the answers' tokens and the seconds."""

    def client(text: str) -> list[int | None]:
        return [server.ask(text, options.tokens) for _ in range(options.requests)]

    began = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [answer for each in pool.map(client, texts) for answer in each]
    return answers, time.perf_counter() - began


def start_ours(options: Options, folder: Path, stack: ExitStack) -> Server:
    """Start the node, without a cache of prompts: every request is computed whole."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "muser_decode", *node_arguments(options.model, ready)]
    launch(command, options, folder / "ours.log", stack, ready.exists)
    return Server(OURS, int(json.loads(ready.read_text())["port"]), {"ignore_eos": True})


def node_arguments(model: Path, ready: Path) -> list[str]:
    """Return the arguments of a node in f32 on a free port that keeps nothing of a request for others."""
    arguments = ["serve", "--model", str(model.absolute()), "--port", "0", "--ready-file", str(ready)]
    return [*arguments, "--dtype", "f32", "--kv", "f16", "--cache-memory-mb", "0"]


def start_mlx_lm(options: Options, folder: Path, stack: ExitStack) -> Server:
    """Start mlx-lm's server over the same weights and vocabulary; its cache of prompts holds nothing."""
    python, model = peer_python(options.venv, REQUIREMENTS), folder / "model"
    model.mkdir()
    write_folder(open_checkpoint(options.model), model)
    backend, _ = read_gguf(options.model)
    backend.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    port = free_port()
    command = [str(python), str(PEERS_DIR / "mlxlm_server.py"), "--model", str(model), "--port", str(port)]
    command += ["--log-level", "WARNING", "--prompt-cache-size", "1", "--prompt-cache-bytes", "1"]
    server = Server(MLX_LM, port, {"model": str(model)})
    launch(command, options, folder / "mlx_lm.log", stack, lambda: server.ask("a", 1) is not None)
    return server


def free_port() -> int:
    """Return a loopback port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(command: Sequence[str], options: Options, log: Path, stack: ExitStack, ready: Callable[[], bool]) -> None:
    """Start a server and wait until it is ready; it is ended with `stack`.

    Raises:
        BenchError: it ended, or was not ready in time; the message holds the end of its log.
    """
    environment = {**os.environ, **thread_limits(options.threads), "PYTHONPATH": str(ROOT)}
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    stack.callback(process.wait)
    stack.callback(process.kill)
    end = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise BenchError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
