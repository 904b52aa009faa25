"""What HTTP and scheduling cost: a node's streamed answer, seen by its client, against the engine's batch alone.

`python -m bench.http --help` lists the options. Both take the same weights in f32, in one process, since two processes
with the same weights differ by more than is measured here; the client is another process, as it is in life. The same
short prompt, BLAS and threads. On a shared machine the same step takes half as long again a second later, so there are
many short rounds, and the goals compare the fastest of each; medians are printed too. The result is refused when the
tokens differ.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from bench.batch import node_arguments, prompts
from bench.driver import BenchError, Goal, Peer, Samples, judge, machine, table, write_result
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tokenizer import load_tokenizer

ENGINE, CLIENT = "engine", "client over HTTP"
MOST_A_TOKEN = 1.05
"""How many times the engine's own time a token may take at the client."""

MOST_TO_FIRST = 1.2
"""How many times the engine's own time the first token of a short prompt may take at the client."""

PROMPT_TOKENS = 16
ANSWER_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One answer: its text, seconds to the first token, seconds from the first to the last."""

    text: str
    first_s: float
    rest_s: float


class Client:
    """Streams completions from a node."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, text: str, tokens: int) -> Answer:
        """Return a greedy answer, timed from the request to each of its chunks.

        Raises:
            BenchError: the node refused, or gave another number of tokens.
        """
        body: dict[str, object] = {
            "model": "muser",
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        with closing(connection):
            return self._read(connection, body, tokens)

    def _read(self, connection: http.client.HTTPConnection, body: dict[str, object], tokens: int) -> Answer:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise BenchError(f"the node answers {response.status}: {response.read()[:500]!r}")
        at: list[float] = []
        text, told = "", 0
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                piece = "".join(choice["text"] for choice in chunk["choices"])
                at += [time.perf_counter()] if piece else []
                text += piece
                told = (chunk.get("usage") or {}).get("completion_tokens", told)
        if told != tokens:
            raise BenchError(f"{told} tokens were answered, not {tokens}")
        return Answer(text, at[0] - began, at[-1] - at[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="bench.http", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file of a llama model; without it the fetched smollm2")
    parser.add_argument("--tokens", type=int, default=12, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=40, help="measurements of each")
    parser.add_argument("--threads", type=int, default=1, help="BLAS threads: the rest of the machine is the client's")
    parser.add_argument("--out", type=Path, help="write the samples here, as JSON")
    args = parser.parse_args(argv)
    host = machine()
    try:
        with ExitStack() as stack:
            first, rest = measure(args, stack)
    except (BenchError, WireError) as error:
        print(f"bench.http: {error}", file=sys.stderr)
        return 1
    steps = args.tokens - 1
    rows = [
        [name, *(f"{1e3 * value(name):.1f}" for value in (first.least, first.median))]
        + [f"{1e3 * value(name) / steps:.2f}" for value in (rest.least, rest.median)]
        for name in (ENGINE, CLIENT)
    ]
    print(table(["", "ms to the first token", "median", "ms a token after it", "median"], rows))
    if args.out is not None:
        write_result(args.out, host, unit="seconds", threads=args.threads, first=first, rest=rest)
    return judge([goal("a token", MOST_A_TOKEN, rest), goal("to the first token", MOST_TO_FIRST, first)])


def goal(what: str, most: float, samples: Samples) -> Goal:
    """Return that the client's time is at most so many times the engine's."""
    share = samples.least(ENGINE) / samples.least(CLIENT)
    return Goal(f"engine's time {what}, of the client's; 1/{most}", 1 / most, share)


def measure(args: argparse.Namespace, stack: ExitStack) -> tuple[Samples, Samples]:
    """Return the seconds to the first token and after it, of both, in turn. A first round does not count.

    Raises:
        BenchError: the answers differ.
    """
    model = args.model or fetched_path("smollm2", muser_home())
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    ready = folder / "ready.json"
    node = Peer("node", "ours_node.py", Path(sys.executable), args.threads)
    stack.callback(node.close)
    node.call("start", arguments=node_arguments(model, ready), ready=str(ready))
    client = Client(json.loads(ready.read_text())["port"])
    ids = prompts(model, 1)[0][:PROMPT_TOKENS]
    tokenizer = load_tokenizer(model)
    text = tokenizer.decode(ids)

    def engine() -> Answer:
        told = node.call("decode", ids=ids, tokens=args.tokens)
        return Answer(tokenizer.decode(told["tokens"]), told["prefill_s"], told["seconds"])

    ways: dict[str, Callable[[], Answer]] = {ENGINE: engine, CLIENT: lambda: client.ask(text, args.tokens)}
    rounds: list[dict[str, Answer]] = []
    for index in range(args.rounds + 1):
        # Who comes second finds the machine busier, or awake: each does in every other round.
        order = list(ways) if index % 2 else list(reversed(ways))
        rounds.append({name: ways[name]() for name in order})
        if len({answer.text for answer in rounds[-1].values()}) > 1:
            raise BenchError("the node's answer is not the engine's")
    counted = rounds[1:]
    first = Samples({name: tuple(each[name].first_s for each in counted) for name in ways})
    rest = Samples({name: tuple(each[name].rest_s for each in counted) for name in ways})
    return first, rest


if __name__ == "__main__":
    sys.exit(main())
