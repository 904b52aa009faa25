"""Both nodes as the processes that a user starts, on a tiny model, over real HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muser_decode.serve import bind
from muser_wire.cli.nodes import Pair, PairOptions, running_pair
from muser_wire.model.tiny import write_tiny_llama
from muser_wire.transport.ports import PortTaken

START_S = 90.0
ANSWER_S = 60.0
SENTENCE = "The reader works through the text and the writer gives the answer, word by word. "


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A MUSER_HOME of its own, so that node keys are made here."""
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def nodes(tiny_llama: Path, tmp_path: Path, home: Path) -> Iterator[Pair]:
    """Both nodes, ready; the producer is used whenever it is ready."""
    options = PairOptions(tiny_llama, tmp_path, start_timeout_s=START_S, route="remote", threads=1, cache_memory_mb=0)
    with running_pair(options) as pair:
        pair.start(lambda node: None)
        yield pair


def chat(port: int, repeat: int = 12, **body: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return (status, headers, body) of a greedy chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    message = {"role": "user", "content": SENTENCE * repeat}
    payload = {"model": "muser", "messages": [message], "temperature": 0, "max_tokens": 12, **body}
    connection.request("POST", "/v1/chat/completions", json.dumps(payload), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, answer


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def run_node(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to refuse to start."""
    command = [sys.executable, "-m", module, "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


def test_a_chat_is_prefilled_remotely_and_the_same_when_the_producer_is_killed(nodes: Pair, home: Path) -> None:
    port = nodes.decode.ports["port"]
    status, headers, remote = chat(port)
    assert (status, headers["x-muser-route"]) == (200, "remote")
    account = remote["muser"]
    assert account["segments_verified"] > 0
    assert account["local_tokens"] == 0
    assert {"prefill_s", "wire_s", "first_token_s", "tokens_per_second"} <= set(account["timings"])
    key = home / "keys" / "prefill.ed25519"
    assert key.stat().st_mode & 0o777 == 0o600

    nodes.prefill.kill()
    status, headers, local = chat(port)
    assert (status, headers["x-muser-route"]) == (200, "local")
    assert text_of(local) == text_of(remote)
    assert local["muser"]["reason"]
    assert "route=local" in nodes.decode.log_tail()
    assert nodes.decode.stop() == 0


class SmallGrid(Pair):
    """A pair on a grid of 128 tokens, whose producer sends slowly, so that a kill falls between two chunks."""

    def _prefill_command(self) -> list[str]:
        return [*super()._prefill_command(), "--chunk-tokens", "128", "--max-rate", "400k"]

    def _decode_command(self) -> list[str]:
        return [*super()._decode_command(), "--chunk-tokens", "128"]


def test_a_producer_killed_in_the_middle_of_a_prefill_costs_no_answer(
    tiny_llama: Path, tmp_path: Path, home: Path
) -> None:
    options = PairOptions(tiny_llama, tmp_path, start_timeout_s=START_S, route="remote", threads=1, cache_memory_mb=0)
    pair = SmallGrid(options, piped=False)
    try:
        pair.start(lambda node: None)
        port = pair.decode.ports["port"]
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(chat(port, repeat=19)))
        asking.start()
        # About 1,600 tokens of 768 bytes at 400 kB/s take 3 s, a chunk a quarter of one.
        time.sleep(1.5)
        pair.prefill.kill()
        asking.join(ANSWER_S)
        status, headers, answer = answers[0]
        assert (status, headers["x-muser-route"]) == (200, "salvaged")
        account = answer["muser"]
        assert account["remote_tokens"] > 0
        assert account["remote_tokens"] % 128 == 0
        assert account["local_tokens"] > 0
        _, headers, alone = chat(port, repeat=19)
        assert headers["x-muser-route"] == "local"
        assert text_of(answer) == text_of(alone)
    finally:
        pair.stop()


def test_a_frozen_producer_is_noticed_within_its_bound(nodes: Pair) -> None:
    port = nodes.decode.ports["port"]
    _, _, remote = chat(port)
    os.killpg(nodes.prefill.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    status, headers, answer = chat(port)
    waited = time.monotonic() - started
    os.killpg(nodes.prefill.process.pid, signal.SIGCONT)
    assert (status, headers["x-muser-route"]) == (200, "local")
    assert text_of(answer) == text_of(remote)
    # The call's bound of 2 s, and the answer itself on a slow machine.
    assert waited < 10.0


def test_a_producer_that_comes_back_is_used_again(nodes: Pair, tiny_llama: Path, tmp_path: Path) -> None:
    port, control = nodes.decode.ports["port"], nodes.prefill.ports["control_port"]
    _, _, before = chat(port)
    nodes.prefill.kill()
    assert chat(port)[1]["x-muser-route"] == "local"
    ready = tmp_path / "again.json"
    flags = ["--model", str(tiny_llama), "--dtype", "f32", "--kv", "f16", "--threads", "1", "--ready-file", str(ready)]
    again = subprocess.Popen(
        [sys.executable, "-m", "muser_prefill", "serve", "--control-port", str(control), "--data-port", "0", *flags],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        route = ""
        while route != "remote" and time.monotonic() < deadline:
            time.sleep(0.5)
            _, headers, answer = chat(port)
            route = headers["x-muser-route"]
            assert text_of(answer) == text_of(before)
        assert route == "remote"
    finally:
        again.terminate()
        assert again.wait(START_S) == 0


def test_both_nodes_drain_and_exit_cleanly_on_sigterm(nodes: Pair) -> None:
    chat(nodes.decode.ports["port"])
    assert nodes.stop() == [0, 0]


def test_a_client_that_leaves_frees_both_nodes(nodes: Pair) -> None:
    port = nodes.decode.ports["port"]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as leaving:
            body = json.dumps(
                {"model": "muser", "messages": [{"role": "user", "content": SENTENCE * 20}], "max_tokens": 500}
            ).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            leaving.sendall(head.encode() + body)
            time.sleep(0.05)
    assert chat(port)[1]["x-muser-route"] == "remote"


def test_two_nodes_cannot_have_one_port(tiny_llama: Path, home: Path) -> None:
    holder = bind("127.0.0.1", 0)
    port = holder.getsockname()[1]
    with pytest.raises(PortTaken, match=f"port {port} .*muser-decode"):
        bind("127.0.0.1", port)
    holder.close()


@pytest.mark.parametrize("name", ["foo", "cuda"])
def test_a_device_that_is_not_there_is_named(name: str, tiny_llama: Path, home: Path) -> None:
    if name == "cuda" and torch.cuda.is_available():
        name = "cuda:99"
    done = run_node("muser_prefill", "--model", str(tiny_llama), "--device", name, "--control-port=0", "--data-port=0")
    assert done.returncode == 2
    assert f"--device {name} cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
def test_an_unknown_model_path_is_named(module: str, tmp_path: Path, home: Path) -> None:
    done = run_node(module, "--model", str(tmp_path / "nothing.gguf"))
    assert done.returncode == 2
    assert "nothing.gguf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
def test_a_model_file_cut_short_is_named(module: str, tmp_path: Path, tiny_llama: Path, home: Path) -> None:
    cut = tmp_path / "cut"
    write_tiny_llama(cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run_node(module, "--model", str(cut))
    assert done.returncode == 2
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "flag", "other"),
    [("muser_prefill", "--control-port", "muser-prefill"), ("muser_decode", "--port", "muser-decode")],
)
def test_a_taken_port_is_named_with_who_may_hold_it(
    module: str, flag: str, other: str, tiny_llama: Path, home: Path
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        extra = ["--data-port", "0"] if module == "muser_prefill" else []
        done = run_node(module, "--model", str(tiny_llama), flag, str(port), *extra)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert other in done.stderr.split("serves", 1)[-1]


@pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])
def test_an_address_beyond_loopback_is_refused(module: str, tiny_llama: Path, home: Path) -> None:
    done = run_node(module, "--model", str(tiny_llama), "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "0.0.0.0 is not a loopback address" in done.stderr


def test_a_key_file_that_others_can_read_is_refused(tiny_llama: Path, home: Path) -> None:
    keys = home / "keys"
    keys.mkdir(parents=True)
    (keys / "prefill.ed25519").write_bytes(bytes(32))
    (keys / "prefill.ed25519").chmod(0o644)
    done = run_node("muser_prefill", "--model", str(tiny_llama), "--control-port", "0", "--data-port", "0")
    assert done.returncode == 2
    assert "mode 0644" in done.stderr


def test_a_producer_with_another_grid_is_refused_by_name_over_the_wire(
    tiny_llama: Path, tmp_path: Path, home: Path
) -> None:
    class OtherGrid(Pair):
        def _prefill_command(self) -> list[str]:
            return [*super()._prefill_command(), "--chunk-tokens", "64"]

    options = PairOptions(tiny_llama, tmp_path, start_timeout_s=START_S, route="remote", threads=1, cache_memory_mb=0)
    pair = OtherGrid(options, piped=False)
    try:
        pair.start(lambda node: None)
        status, headers, answer = chat(pair.decode.ports["port"])
        assert (status, headers["x-muser-route"]) == (200, "local")
        assert "chunk_tokens differs: 2048 here, 64 at the peer" in answer["muser"]["reason"]
    finally:
        pair.stop()
