"""Real processes that die, freeze and restart at each stage of a handoff: the answer stays, and comes in time."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import Node, pause
from muser_wire.model.tiny import write_tiny_llama

START_S = 90.0
ANSWER_S = 60.0
COMES_BACK_S = 15.0
SETTLE_S = 10.0

SENTENCE = "The reader works through the text and the writer gives the answer, word by word. "
LONG, SHORT = 38, 3
"""Sentences of a prompt of some 1,850 tokens, and of one of some 150."""

CHUNK_TOKENS = 128
LONG_CHUNKS = 15
FIRST, LATE = 1, 11
"""Verified chunks of the long prompt at which a fault comes."""

BEFORE = 0

MAX_RATE = 400_000
"""Bytes a second: the long prompt takes over 3 s, so that a fault falls between two of its chunks."""

CHUNK_S = CHUNK_TOKENS * 6 * 2 * 2 * 16 * 2 / MAX_RATE
"""6 layers, keys and values, 2 heads of 16, 2 bytes: a quarter of a second."""

DEAD_S = 2.0
"""A dead peer is known within this: a call's timeout."""

FROZEN_S = 3 * CHUNK_S + 2.0
"""A frozen peer is known within three chunk times and the grace; keepalive, where it looks, takes 2 s."""

SLACK_S = 3.0
"""What an answer takes besides: the long prompt computed here and 12 tokens, 0.3 s when the cores are free."""

GROWTH_NBYTES = 8 << 20
"""What a node's process may gain over all failures. A leaked cache of the long prompt is 2,048 tokens of
1,536 bytes: nine of them are 27 MiB."""


@dataclass
class Answer:
    """What a chat's client sees, and when."""

    text: str
    route: str
    account: dict[str, Any]
    came_s: float


def chat(port: int, repeat: int) -> Answer:
    """Ask one greedy chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    message = {"role": "user", "content": SENTENCE * repeat}
    payload = {"model": "muser", "messages": [message], "temperature": 0, "max_tokens": 12}
    connection.request("POST", "/v1/chat/completions", json.dumps(payload), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = json.loads(response.read())
    came_s = time.monotonic()
    connection.close()
    assert response.status == 200, body
    text = str(body["choices"][0]["message"]["content"])
    return Answer(text, str(response.getheader("x-muser-route")), body["muser"], came_s)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(what: Callable[[], bool], timeout_s: float, why: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def resident_nbytes(node: Node) -> int:
    return memory_nbytes(node, 1)


def memory_nbytes(node: Node, column: int) -> int:
    """Return a number of `/proc/PID/statm` in bytes: column 0 is address space, 1 is resident memory."""
    pages = int(Path(f"/proc/{node.process.pid}/statm").read_text().split()[column])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Grid:
    """A producer on fixed ports and the decode nodes that use it, as processes on a grid of 128 tokens."""

    model: Path
    folder: Path
    max_rate: int = MAX_RATE
    control_port: int = field(default_factory=free_port)
    data_port: int = field(default_factory=free_port)
    started: list[Node] = field(default_factory=list)
    references: dict[int, str] = field(default_factory=dict)
    """Answers of the decode node alone, by the length of their prompt."""

    levels_nbytes: dict[str, int] = field(default_factory=dict)
    """Resident memory of the first processes of both nodes before the first failure, by their names."""

    def start(self, name: str, module: str, *flags: str) -> Node:
        """Start a node; its name is its own, and `wait_ready` is the caller's."""
        numerics = ["--dtype", "f32", "--kv", "f16", "--threads", "1", "--chunk-tokens", str(CHUNK_TOKENS)]
        # Every failure is to meet a handoff, so nothing is kept of one prompt for the next.
        sizes = ["--drain-s", "5", "--cache-memory-mb", "0"]
        shared = ["--model", str(self.model), "--host", "127.0.0.1", *sizes, *numerics]
        node = Node(name, [sys.executable, "-m", module, "serve", *shared, *flags], self.folder, piped=False)
        self.started.append(node)
        return node

    def start_producer(self) -> Node:
        """Start the producer, or start it again."""
        ports = ["--control-port", str(self.control_port), "--data-port", str(self.data_port)]
        name = f"prefill-{len(self.started)}"
        flags = [*ports, "--max-rate", str(self.max_rate), "--trace", str(self.trace(name))]
        self.producer = self.start(name, "muser_prefill", *flags)
        return self.producer

    def start_decode(self, name: str) -> Node:
        """Start a decode node that writes what it verifies to a trace."""
        producer = f"127.0.0.1:{self.control_port}"
        flags = ["--port", "0", "--producer", producer, "--route", "remote", "--trace", str(self.trace(name))]
        return self.start(name, "muser_decode", *flags)

    def trace(self, name: str) -> Path:
        """Where a node writes what it does; each segment is a whole chunk here."""
        return self.folder / f"{name}.trace"

    def verified(self, name: str) -> int:
        """Chunks that a decode node has verified since it started."""
        return self.trace(name).read_text().count('"verify"')

    def sent(self) -> int:
        """Chunks that the producer has sent since it started."""
        return self.trace(self.producer.name).read_text().count('"wire"')

    def learn(self) -> None:
        """Start both; note what the decode node answers alone, and what both hold after a short remote answer."""
        decode = self.start_decode("decode")
        decode.wait_ready(START_S, pause)
        producer = self.start_producer()
        for repeat in (SHORT, LONG):
            alone = chat(decode.ports["port"], repeat)
            assert alone.route == "local"
            self.references[repeat] = alone.text
        producer.wait_ready(START_S, pause)
        self.ask_until_remote(decode.ports["port"])
        self.levels_nbytes = {node.name: resident_nbytes(node) for node in self.started}

    def ask_whole(self) -> None:
        """Have the long prompt prefilled remotely to its end."""
        whole = chat(self.started[0].ports["port"], LONG)
        assert (whole.route, whole.text) == ("remote", self.references[LONG])
        assert (LONG_CHUNKS - 1) * CHUNK_TOKENS < whole.account["remote_tokens"] <= LONG_CHUNKS * CHUNK_TOKENS

    def check_levels(self, growth_nbytes: int = GROWTH_NBYTES) -> None:
        """Check that those of the first processes that still run come to hold no more than before."""
        for node in self.started:
            if node.name in self.levels_nbytes and node.process.poll() is None:
                most = self.levels_nbytes[node.name] + growth_nbytes
                why = f"{node.name} keeps what its requests took"
                wait_for(lambda node=node, most=most: resident_nbytes(node) < most, SETTLE_S, why)

    def ask_until_remote(self, port: int) -> None:
        """Ask until an answer is remote again; every one on the way is right."""
        deadline = time.monotonic() + COMES_BACK_S
        while (answer := chat(port, SHORT)).route != "remote":
            assert answer.text == self.references[SHORT]
            assert time.monotonic() < deadline, f"not remote again: {answer.account['reason']}"
            time.sleep(0.2)
        assert answer.text == self.references[SHORT]

    def signal_producer(self, number: signal.Signals) -> None:
        os.killpg(self.producer.process.pid, number)


@pytest.fixture(scope="module")
def grid(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Both nodes, ready, after a first remote answer; what the decode node answers alone is known."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("grid")
        patch.setenv("MUSER_HOME", str(folder / "home"))
        grid = Grid(tiny_llama, folder)
        try:
            grid.learn()
            grid.ask_whole()
            grid.levels_nbytes = {node.name: resident_nbytes(node) for node in grid.started}
            yield grid
        finally:
            for node in grid.started:
                node.kill()


def fault(grid: Grid, kind: str) -> None:
    """Do to the producer what the case says."""
    if kind == "SIGSTOP":
        grid.signal_producer(signal.SIGSTOP)
        return
    grid.producer.kill()
    if kind == "restart":
        grid.start_producer()


def bring_back(grid: Grid, kind: str) -> None:
    """Undo it: from here on nobody helps."""
    if kind == "SIGSTOP":
        grid.signal_producer(signal.SIGCONT)
        return
    if kind == "SIGKILL":
        grid.start_producer()
    grid.producer.wait_ready(START_S, pause)


def ask_with_a_fault(grid: Grid, port: int, kind: str, moment: int) -> tuple[Answer, float]:
    """Return the answer and how long it took from the fault, or from the question if that came later."""
    if moment == BEFORE:
        fault(grid, kind)
        if kind == "restart":
            # The producer is another one, and the decode node may still take it for the old one.
            grid.producer.wait_ready(START_S, pause)
        asked_s = time.monotonic()
        answer = chat(port, LONG)
        return answer, answer.came_s - asked_s
    seen = grid.verified("decode")
    with ThreadPoolExecutor(1) as pool:
        asking: Future[Answer] = pool.submit(chat, port, LONG)
        wait_for(lambda: grid.verified("decode") - seen >= moment, 10.0, "the handoff never came so far")
        fault_s = time.monotonic()
        fault(grid, kind)
        answer = asking.result(ANSWER_S)
    return answer, answer.came_s - fault_s


@pytest.mark.parametrize("moment", [BEFORE, FIRST, LATE], ids=["before", "first-chunk", "late"])
@pytest.mark.parametrize("kind", ["SIGSTOP", "SIGKILL", "restart"])
def test_a_producer_that_fails(grid: Grid, kind: str, moment: int) -> None:
    decode = grid.started[0]
    port = decode.ports["port"]
    assert chat(port, SHORT).route == "remote"
    answer, waited_s = ask_with_a_fault(grid, port, kind, moment)
    bring_back(grid, kind)
    assert answer.text == grid.references[LONG]
    check_route(answer, kind, moment)
    bound_s = FROZEN_S if kind == "SIGSTOP" else DEAD_S
    own_s = LONG_CHUNKS * CHUNK_S if answer.route == "remote" else 0.0
    assert waited_s < bound_s + own_s + SLACK_S
    grid.ask_until_remote(port)
    grid.check_levels()


def check_route(answer: Answer, kind: str, moment: int) -> None:
    """What came in whole chunks stays; the reason says why no more did."""
    account = answer.account
    if moment != BEFORE:
        assert answer.route == "salvaged"
        assert account["remote_tokens"] >= moment * CHUNK_TOKENS
        assert account["remote_tokens"] % CHUNK_TOKENS == 0
        assert account["local_tokens"] > 0
    else:
        # A restarted producer answers again; whether the decode node has seen that yet is a matter of its poll.
        assert answer.route == "local" or (kind, answer.route) == ("restart", "remote")
    assert bool(account["reason"]) is (answer.route != "remote")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_node_that_fails_frees_the_producer(grid: Grid, number: signal.Signals) -> None:
    victim, heir = grid.start_decode(f"victim-{number.name}"), grid.start_decode(f"heir-{number.name}")
    for node in (victim, heir):
        node.wait_ready(START_S, pause)
    sent = grid.sent()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chat, victim.ports["port"], LONG)
        wait_for(lambda: grid.verified(victim.name) >= FIRST, ANSWER_S, "the handoff never began")
        os.killpg(victim.process.pid, number)
        failed_s = time.monotonic()
        try:
            answer = chat(heir.ports["port"], SHORT)
            assert (answer.route, answer.text) == ("remote", grid.references[SHORT])
            # The victim's handoff had over 3 s to go at the producer's rate.
            assert answer.came_s - failed_s < DEAD_S + CHUNK_S
            time.sleep(max(0.0, failed_s + LONG_CHUNKS * CHUNK_S + 0.5 - time.monotonic()))
            # A killed node's sockets close at once, a frozen one costs two seconds of chunks; two are the heir's.
            most = FIRST + 2 + (0 if number is signal.SIGKILL else DEAD_S / CHUNK_S) + 2
            assert grid.sent() - sent <= most, "the producer went on sending to a node that is gone"
        finally:
            victim.kill()
            heir.kill()
        with pytest.raises((http.client.HTTPException, OSError)):
            asking.result(ANSWER_S)


SPARE_NBYTES = 16 << 20
"""Address space that the producer keeps for whatever else it does: a thread's stack, a message."""

WIDE = {"layers": 6, "heads": 16, "kv_heads": 16, "head_dim": 128}
"""Keys of the long prompt take 45 MB, and values as much: more than any allocator has in store."""


@pytest.mark.slow
def test_a_producer_whose_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system itself refuses it: the process may not grow. It says so at once, and lives."""
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    write_tiny_llama(tmp_path / "wide", **WIDE)
    grid = Grid(tmp_path / "wide", tmp_path, max_rate=0)
    try:
        grid.learn()
        port, pid = grid.started[0].ports["port"], grid.producer.process.pid
        limit_nbytes = memory_nbytes(grid.producer, 0) + SPARE_NBYTES
        resource.prlimit(pid, resource.RLIMIT_AS, (limit_nbytes, resource.RLIM_INFINITY))
        answer = chat(port, LONG)
        assert (answer.route, answer.text) == ("local", grid.references[LONG])
        assert "prefill failed" in answer.account["reason"]
        # The decode node took the time of a refusal to know; all else is its own prefill.
        assert answer.account["timings"]["wire_s"] < DEAD_S
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        grid.ask_until_remote(port)
        # Less than the cache of this prompt on either node: 90 MB on the producer, twice that here.
        grid.check_levels(80_000_000)
        grid.ask_whole()
        assert grid.producer.process.poll() is None
    finally:
        for node in grid.started:
            node.kill()
