"""What two nodes keep, as processes that a user starts and stops: warm turns, restarts, damage, locks, other models."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import Node, pause
from muser_wire.model.tiny import write_tiny, write_tiny_llama

START_S = 90.0
ANSWER_S = 60.0
CHUNK_TOKENS = 128
SENTENCE = "The reader works through the text and the writer gives the answer, word by word. "
SYSTEM = {"role": "system", "content": SENTENCE * 8}
"""Some 650 tokens: five whole chunks."""

QUESTION = {"role": "user", "content": "Who gives the answer?"}
REPLY_TOKENS = 12

Messages = list[dict[str, str]]


@dataclass
class House:
    """The nodes of one test, on a grid of 128 tokens, with one cache directory."""

    folder: Path
    model: Path
    started: list[Node] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        """The directory that the decode nodes are given."""
        return self.folder / "cache"

    def command(self, module: str, *flags: str, model: Path | None = None) -> list[str]:
        numerics = ["--dtype", "f32", "--kv", "f16", "--threads", "1", "--chunk-tokens", str(CHUNK_TOKENS)]
        shared = ["--model", str(model or self.model), "--host", "127.0.0.1", "--drain-s", "5", *numerics]
        return [sys.executable, "-m", module, "serve", *shared, *flags]

    def start(self, module: str, *flags: str, model: Path | None = None) -> Node:
        """Start a node and wait until it serves."""
        name = f"{module}-{len(self.started)}"
        node = Node(name, self.command(module, *flags, model=model), self.folder, piped=False)
        self.started.append(node)
        node.wait_ready(START_S, pause)
        return node

    def producer(self, *flags: str) -> Node:
        """A producer; it keeps what it computes unless told otherwise."""
        return self.start("muser_prefill", "--control-port", "0", "--data-port", "0", *flags)

    def decode(
        self, producer: Node | None = None, *, memory_mb: int = 64, disk_mb: int = 0, model: Path | None = None
    ) -> Node:
        """A decode node that keeps prompts; with a producer it asks that whenever it can."""
        sizes = ["--cache-memory-mb", str(memory_mb), "--cache-disk-mb", str(disk_mb), "--cache-dir", str(self.cache)]
        peer = ["--producer", f"127.0.0.1:{producer.ports['control_port']}", "--route", "remote"] if producer else []
        return self.start("muser_decode", "--port", "0", *sizes, *peer, model=model)

    def cold(self, *prompts: Messages, model: Path | None = None) -> list[str]:
        """What a node that keeps nothing answers."""
        node = self.decode(memory_mb=0, model=model)
        texts = [chat(node, messages)["text"] for messages in prompts]
        assert node.stop() == 0
        return texts

    def blocks(self) -> list[Path]:
        """The files of the blocks on disk."""
        return sorted(self.cache.rglob("*.safetensors"))


def request(node: Node, method: str, path: str, body: object = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", node.ports["port"], timeout=ANSWER_S)
    connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return answer


def chat(node: Node, messages: Messages) -> dict[str, Any]:
    """Return the greedy answer's text, the node's account of it, and how many tokens were cached of how many."""
    body = {"model": "muser", "messages": messages, "temperature": 0, "max_tokens": REPLY_TOKENS, "ignore_eos": True}
    answer = request(node, "POST", "/v1/chat/completions", body)
    origins = answer["muser"]["timings"]["tokens_by_origin"]
    usage = answer["usage"]
    assert sum(origins.values()) == usage["prompt_tokens"] - 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == origins["memory"] + origins["disk"]
    return {
        "text": answer["choices"][0]["message"]["content"],
        "origins": origins,
        "account": answer["muser"],
        "prompt": usage["prompt_tokens"],
    }


def explain(node: Node, messages: Messages, *flags: str) -> dict[str, Any]:
    """What `muser cache explain` prints of a chat's body."""
    command = [sys.executable, "-m", "muser_wire.cli", "cache", "explain", "--port", str(node.ports["port"])]
    body = json.dumps({"model": "muser", "messages": messages})
    done = subprocess.run(
        [*command, "--request", "-", "--json", *flags],
        input=body,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def settled(node: Node) -> dict[str, Any]:
    """The node's account of its store."""
    cache: dict[str, Any] = request(node, "GET", "/v1/models/muser")["muser"]["cache"]
    return cache


@pytest.fixture
def house(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    house = House(tmp_path, tiny_llama)
    yield house
    for node in house.started:
        node.kill()


def next_turn(messages: Messages, answer: dict[str, Any]) -> Messages:
    return [*messages, {"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "And then?"}]


def test_a_second_turn_is_warm_and_computes_only_what_is_new(house: House) -> None:
    producer = house.producer()
    node = house.decode(producer)
    first = chat(node, [SYSTEM, QUESTION])
    assert first["account"]["route"] == "remote"
    assert first["origins"]["remote_computed"] == first["prompt"] - 1
    turn = next_turn([SYSTEM, QUESTION], first)
    second = chat(node, turn)
    held = second["origins"]["memory"]
    assert held >= first["prompt"] - 1, second["account"]["held_reason"]
    explained = explain(node, turn)
    assert explained["prompt_tokens"] == second["prompt"]
    assert explained["held_tokens"] == second["prompt"] - 1
    assert [block["where"] for block in explained["blocks"]] == ["memory"] * len(explained["blocks"])
    assert house.cold([SYSTEM, QUESTION], turn) == [first["text"], second["text"]]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_decode_node_that_restarts_is_warm_from_disk_alone(house: House, how: str) -> None:
    node = house.decode(disk_mb=64)
    first = chat(node, [SYSTEM, QUESTION])
    turn = next_turn([SYSTEM, QUESTION], first)
    chat(node, turn)
    # The next request waits until the one before is in memory; a stop, until it is on disk.
    second = chat(node, turn)
    if how == "stopped":
        assert node.stop() == 0
    else:
        node.kill()
    again = house.decode(memory_mb=0, disk_mb=64)
    warm = chat(again, turn)
    assert warm["origins"]["memory"] == 0
    if how == "stopped":
        assert warm["origins"]["disk"] == warm["prompt"] - 1
        assert warm["account"]["route"] == "warm"
    # However much was on disk when it was killed, what is there is right.
    assert warm["text"] == second["text"] == house.cold(turn)[0]
    assert settled(again)["disk_invalid"] == 0


def test_a_producer_that_restarts_is_asked_for_what_the_decode_node_lacks(house: House) -> None:
    producer = house.producer()
    node = house.decode(producer)
    first = chat(node, [SYSTEM, QUESTION])
    other: Messages = [SYSTEM, {"role": "user", "content": SENTENCE}]
    half = chat(node, other)
    assert 0 < half["origins"]["memory"] < half["prompt"] - 1
    # The producer has all that the two prompts share; the decode node may not have saved the last rows of it yet.
    assert half["origins"]["remote_computed"] > 0
    assert (half["origins"]["disk"], half["origins"]["local_computed"]) == (0, 0)
    ports = ["--control-port", str(producer.ports["control_port"]), "--data-port", "0"]
    producer.kill()
    house.start("muser_prefill", *ports)
    deadline, route, asked = time.monotonic() + START_S, "", 0
    while route != "remote" and time.monotonic() < deadline:
        asked += 1
        route = chat(node, [{"role": "user", "content": f"{asked} {SENTENCE}"}])["account"]["route"]
    third: Messages = [SYSTEM, {"role": "user", "content": SENTENCE * 3}]
    delta = chat(node, third)
    assert delta["account"]["route"] == "remote"
    assert delta["origins"]["memory"] >= half["origins"]["memory"]
    # The new producer held nothing, and computed the whole prompt to send its end.
    assert (delta["origins"]["peer"], delta["origins"]["local_computed"]) == (0, 0)
    assert house.cold([SYSTEM, QUESTION], other, third) == [first["text"], half["text"], delta["text"]]


def test_what_a_producer_computed_for_one_node_it_sends_another_without_computing_it(house: House) -> None:
    producer = house.producer()
    first, second = house.decode(producer), house.decode(producer)
    asked = chat(first, [SYSTEM, QUESTION])
    assert asked["origins"]["remote_computed"] == asked["prompt"] - 1
    again = chat(second, [SYSTEM, QUESTION])
    assert again["account"]["route"] == "remote"
    assert again["origins"]["peer"] == again["prompt"] - 1
    assert again["account"]["peer_tokens"] == again["account"]["remote_tokens"]
    other = chat(second, [SYSTEM, {"role": "user", "content": SENTENCE}])
    assert other["origins"]["memory"] > 0
    assert other["text"] == house.cold([SYSTEM, {"role": "user", "content": SENTENCE}])[0]
    assert again["text"] == asked["text"]


def test_a_second_process_on_one_directory_is_refused_by_name(house: House) -> None:
    node = house.decode(disk_mb=64)
    command = house.command("muser_decode", "--port", "0", "--cache-disk-mb", "64", "--cache-dir", str(house.cache))
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2
    assert f"{house.cache}" in done.stderr
    assert "in use by another process" in done.stderr
    assert "Traceback" not in done.stderr
    assert chat(node, [SYSTEM, QUESTION])["text"]
    assert house.decode(disk_mb=0).stop() == 0, "without a disk nothing is shared"
    node.kill()
    assert house.decode(disk_mb=64).stop() == 0, "a lock ends with its process"


def test_two_models_served_in_turn_do_not_meet(house: House, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tiny_llama(other, seed=7)
    prompt: Messages = [SYSTEM, QUESTION]
    cold = {model: house.cold(prompt, model=model)[0] for model in (house.model, other)}
    assert cold[house.model] != cold[other], "models that answer alike would prove little"
    for round_ in range(2):
        for model in (house.model, other):
            node = house.decode(memory_mb=0, disk_mb=64, model=model)
            answer = chat(node, prompt)
            assert answer["text"] == cold[model]
            assert answer["origins"]["disk"] == (answer["prompt"] - 1 if round_ else 0)
            if (round_, model) == (0, other):
                explained = explain(node, [SYSTEM, {"role": "user", "content": "x"}])
                (elsewhere,) = explained["elsewhere"]
                assert elsewhere["differs"] == ["weights_digest"]
                assert elsewhere["held_tokens"] > 0
            assert node.stop() == 0


def test_another_grid_and_another_window_do_not_meet(house: House, tmp_path: Path) -> None:
    sliding = tmp_path / "sliding"
    write_tiny("gemma3", sliding, layers=4, window=64)
    prompt: Messages = [{"role": "user", "content": SENTENCE * 8}]
    cold = house.cold(prompt, model=sliding)[0]
    for chunk in ("128", "256"):
        sizes = ["--cache-memory-mb", "0", "--cache-disk-mb", "64", "--cache-dir", str(house.cache)]
        node = house.start("muser_decode", "--port", "0", *sizes, "--chunk-tokens", chunk, model=sliding)
        answer = chat(node, prompt)
        assert (answer["origins"]["disk"], answer["text"]) == (0, cold)
        assert node.stop() == 0
    node = house.decode(memory_mb=0, disk_mb=64, model=sliding)
    warm = chat(node, prompt)
    assert warm["origins"]["disk"] >= (warm["prompt"] - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert warm["text"] == cold


def test_a_store_of_another_version_is_ignored_and_named(house: House) -> None:
    node = house.decode(memory_mb=0, disk_mb=64)
    first = chat(node, [SYSTEM, QUESTION])
    assert node.stop() == 0
    (house.cache / "kvpack-1").rename(house.cache / "kvpack-0")
    older = {path: path.read_bytes() for path in house.blocks()}
    node = house.decode(memory_mb=0, disk_mb=64)
    again = chat(node, [SYSTEM, QUESTION])
    assert (again["origins"]["disk"], again["text"]) == (0, first["text"])
    assert explain(node, [SYSTEM, QUESTION])["ignored_stores"] == ["kvpack-0"]
    assert node.stop() == 0
    assert {path: path.read_bytes() for path in older} == older


def test_a_damaged_block_is_a_miss_that_is_deleted_counted_and_explained(house: House) -> None:
    node = house.decode(memory_mb=0, disk_mb=64)
    first = chat(node, [SYSTEM, QUESTION])
    assert node.stop() == 0
    victim = next(path for path in house.blocks() if b'"start":"256"' in path.read_bytes())
    data = bytearray(victim.read_bytes())
    data[-1000] ^= 4
    victim.write_bytes(data)
    node = house.decode(memory_mb=0, disk_mb=64)
    again = chat(node, [SYSTEM, QUESTION])
    assert (again["origins"]["disk"], again["text"]) == (256, first["text"])
    assert again["account"]["held_reason"] == "the block at token 256 was lost or damaged"
    assert settled(node)["disk_invalid"] == 1
    assert settled(node)["lost"] == 1
    # It was computed and saved again, under the same name.
    assert node.stop() == 0
    assert bytes(data) != victim.read_bytes()
    node = house.decode(memory_mb=0, disk_mb=64)
    warm = chat(node, [SYSTEM, QUESTION])
    assert (warm["origins"]["disk"], warm["text"]) == (warm["prompt"] - 1, first["text"])


def test_a_damaged_block_that_was_not_asked_for_again_is_explained(house: House) -> None:
    node = house.decode(memory_mb=0, disk_mb=64)
    chat(node, [SYSTEM, QUESTION])
    assert node.stop() == 0
    victim = next(path for path in house.blocks() if b'"start":"256"' in path.read_bytes())
    victim.write_bytes(victim.read_bytes()[:100])
    node = house.decode(memory_mb=0, disk_mb=64)
    explained = explain(node, [SYSTEM, QUESTION])
    assert explained["held_tokens"] == 256
    assert explained["reason"] == "failed a check and was deleted"
    # Its tail was longer than the prompt, so its name says nothing of it.
    assert explained["blocks"][3]["reason"] == "the one before it is not held"
    assert not victim.exists()
