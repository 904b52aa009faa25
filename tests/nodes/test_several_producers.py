"""One decode node and several producers, as processes: who gets a prompt, and who carries on when one is killed."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import Node, pause

START_S = 90.0
ANSWER_S = 60.0
COMES_BACK_S = 20.0
"""The longest pause between two looks at a producer that is down is 8 s; the rest is for a slow machine."""

SENTENCE = "The reader works through the text and the writer gives the answer, word by word. "
LONG, SHORT = 38, 3
"""Sentences of a prompt of some 1,850 tokens, and of one of some 150."""

CHUNK_TOKENS = 128
MAX_RATE = 400_000
"""Bytes a second: the long prompt takes over 3 s, so that a kill falls between two of its chunks."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    connection.request("GET", path)
    body = json.loads(connection.getresponse().read())
    connection.close()
    return body


def chat(port: int, repeat: int) -> tuple[str, str, dict[str, Any]]:
    """Return (text, route, account) of a greedy chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    message = {"role": "user", "content": SENTENCE * repeat}
    payload = {"model": "muser", "messages": [message], "temperature": 0, "max_tokens": 12}
    connection.request("POST", "/v1/chat/completions", json.dumps(payload), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    assert response.status == 200, body
    return str(body["choices"][0]["message"]["content"]), str(response.getheader("x-muser-route")), body["muser"]


def wait_for(what: Callable[[], bool], timeout_s: float, why: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


@dataclass
class Farm:
    """Producers by name, HOST:PORT, and one decode node that knows them all. "other" has another grid."""

    model: Path
    folder: Path
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in ("one", "two", "other")})
    nodes: dict[str, Node] = field(default_factory=dict)
    started: list[Node] = field(default_factory=list)
    references: dict[int, str] = field(default_factory=dict)

    def start(self, name: str, module: str, *flags: str) -> Node:
        numerics = ["--dtype", "f32", "--kv", "f16", "--threads", "1"]
        shared = ["--model", str(self.model), "--drain-s", "5", "--cache-memory-mb", "0", *numerics]
        unique = f"{name}-{len(self.started)}"
        trace = ["--trace", str(self.folder / f"{unique}.trace")]
        command = [sys.executable, "-m", module, "serve", *shared, *trace, *flags]
        self.nodes[name] = Node(unique, command, self.folder, piped=False)
        self.started.append(self.nodes[name])
        return self.nodes[name]

    def start_producer(self, name: str) -> Node:
        grid = CHUNK_TOKENS if name != "other" else 64
        sizes = ["--chunk-tokens", str(grid), "--max-rate", str(MAX_RATE)]
        return self.start(name, "muser_prefill", "--control-port", str(self.ports[name]), "--data-port", "0", *sizes)

    def start_decode(self) -> Node:
        producers = [flag for name in self.ports for flag in ("--producer", self.address(name))]
        sizes = ["--chunk-tokens", str(CHUNK_TOKENS), "--route", "remote"]
        return self.start("decode", "muser_decode", "--port", "0", *sizes, *producers)

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    @property
    def port(self) -> int:
        return self.nodes["decode"].ports["port"]

    def seen(self, name: str, what: str) -> int:
        """How often a node's trace has this word: "verify" and "wire" are chunks here."""
        return (self.folder / f"{self.nodes[name].name}.trace").read_text().count(f'"{what}"')

    def described(self, name: str) -> dict[str, Any]:
        producers = get(self.port, "/v1/models")["data"][0]["muser"]["producers"]
        (found,) = [each for each in producers if each["name"] == self.address(name)]
        return dict(found)

    def state(self, name: str) -> str:
        return str(self.described(name)["state"])


@pytest.fixture(scope="module")
def farm(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("farm")
        patch.setenv("MUSER_HOME", str(folder / "home"))
        farm = Farm(tiny_llama, folder)
        try:
            # Alone first: what every other way must equal.
            farm.start_decode().wait_ready(START_S, pause)
            for repeat in (SHORT, LONG):
                farm.references[repeat], route, _ = chat(farm.port, repeat)
                assert route == "local"
            for name in farm.ports:
                farm.start_producer(name)
            for name in farm.ports:
                farm.nodes[name].wait_ready(START_S, pause)
            for name in ("one", "two"):
                wait_for(lambda name=name: farm.state(name) == "ready", COMES_BACK_S, f"{name} was never ready")
            yield farm
        finally:
            for node in farm.started:
                node.kill()


def test_a_producer_that_differs_is_excluded_by_name_and_no_other(farm: Farm) -> None:
    wait_for(lambda: farm.state("other") == "refused", COMES_BACK_S, "the other grid was never seen")
    assert farm.described("other")["reason"] == "chunk_tokens differs: 128 here, 64 at the peer"
    text, route, account = chat(farm.port, SHORT)
    assert (route, text) == ("remote", farm.references[SHORT])
    (brought,) = account["producers"].items()
    assert brought[0] in (farm.address("one"), farm.address("two"))
    assert brought[1] == account["remote_tokens"] > 0


def test_ready_lists_every_producer(farm: Farm) -> None:
    body = get(farm.port, "/ready")
    assert body["status"] == "ready"
    assert [each["name"] for each in body["producers"]] == [farm.address(name) for name in farm.ports]


def test_two_prompts_at_once_go_to_two_producers(farm: Farm) -> None:
    # A producer whose link was not measured yet is tried before one that is known to be slow.
    for _ in range(2):
        assert chat(farm.port, LONG)[1] == "remote"
    assert all(farm.described(name)["link_bytes_per_s"] for name in ("one", "two"))
    sent = {name: farm.seen(name, "wire") for name in ("one", "two")}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chat, farm.port, LONG)
        wait_for(lambda: any(farm.seen(name, "wire") > sent[name] for name in sent), ANSWER_S, "nobody began")
        second = pool.submit(chat, farm.port, LONG)
        answers = [first.result(ANSWER_S), second.result(ANSWER_S)]
    assert [(text, route) for text, route, _ in answers] == [(farm.references[LONG], "remote")] * 2
    assert {name for _, _, account in answers for name in account["producers"]} == {
        farm.address("one"),
        farm.address("two"),
    }


def test_when_a_producer_is_killed_in_the_middle_the_other_carries_on(farm: Farm) -> None:
    verified, sent = farm.seen("decode", "verify"), {name: farm.seen(name, "wire") for name in ("one", "two")}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chat, farm.port, LONG)
        wait_for(lambda: farm.seen("decode", "verify") - verified >= 4, ANSWER_S, "the handoff never came so far")
        victim = max(sent, key=lambda name: farm.seen(name, "wire") - sent[name])
        heir = "two" if victim == "one" else "one"
        assert farm.seen(heir, "wire") == sent[heir]
        # On a machine that is busy with other things, a producer may have missed a ping just now.
        wait_for(lambda: farm.state(heir) == "ready", COMES_BACK_S, "the other one is not ready")
        farm.nodes[victim].kill()
        text, route, account = asking.result(ANSWER_S)
    assert text == farm.references[LONG]
    assert route == "salvaged"
    assert account["local_tokens"] == 0, account["reason"]
    brought = account["producers"]
    assert list(brought) == [farm.address(victim), farm.address(heir)]
    assert brought[farm.address(victim)] >= 4 * CHUNK_TOKENS
    assert brought[farm.address(victim)] % CHUNK_TOKENS == 0
    assert brought[farm.address(heir)] > 0
    assert sum(brought.values()) == account["remote_tokens"]
    # Delta: the heir sent only what was missing, each token once. 6 layers, keys and values, 2 heads of 16, 2 bytes.
    assert account["payload_bytes"] - account["remote_tokens"] * 6 * 2 * 2 * 16 * 2 in range(CHUNK_TOKENS * 768)
    assert account["reason"].startswith(f"{farm.address(victim)}: transport: ")

    wait_for(lambda: farm.state(victim) == "unreachable", COMES_BACK_S, "the kill was never seen")
    text, route, account = chat(farm.port, SHORT)
    assert (text, route, list(account["producers"])) == (farm.references[SHORT], "remote", [farm.address(heir)])

    farm.start_producer(victim).wait_ready(START_S, pause)
    wait_for(lambda: farm.state(victim) == "ready", COMES_BACK_S, "it was never asked again")
    farm.nodes[heir].kill()
    text, route, account = chat(farm.port, SHORT)
    assert (text, route, list(account["producers"])) == (farm.references[SHORT], "remote", [farm.address(victim)])
