from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench import batch
from bench.driver import BenchError, Samples


class Answering(BaseHTTPRequestHandler):
    """A completions endpoint: a prompt of "bad" is refused, "cut" loses its connection, others get three tokens."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, body["temperature"], body["ignore_eos"]) == ("/v1/completions", 0, True)
        if body["prompt"] == "cut":
            self.close_connection = True
            return
        answer = json.dumps({"usage": {"completion_tokens": min(3, body["max_tokens"])}}).encode()
        self.send_response(500 if body["prompt"] == "bad" else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[batch.Server]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield batch.Server("s", http.server_address[1], {"ignore_eos": True})
    http.shutdown()
    http.server_close()
    thread.join(10)


def test_tokens_are_those_that_the_server_counts_and_failures_are_none(server: batch.Server) -> None:
    assert server.ask("good", 8) == 3
    assert server.ask("good", 2) == 2
    assert server.ask("bad", 8) is None
    assert server.ask("cut", 8) is None
    assert batch.Server("nobody", batch.free_port()).ask("good", 8) is None


def test_each_client_asks_as_often_as_it_shall(server: batch.Server) -> None:
    options = batch.Options.parse(["--model", "m", "--requests", "3", "--tokens", "2", "--no-peers"])
    answers, seconds = batch.load(server, ["good", "bad"], options)
    assert answers == [2, 2, 2, None, None, None]
    assert seconds > 0


def test_a_server_that_fails_one_request_in_four_misses_its_goal() -> None:
    served = batch.Served(Samples({batch.OURS: (1.0,), batch.MLX_LM: (2.0,)}), {batch.OURS: 1, batch.MLX_LM: 0}, 4)
    assert served.answered(batch.OURS) == 0.75
    assert served.rates.ratio(*served.pair) == 0.5


def test_prompts_are_different_and_of_one_length(smollm2: Path) -> None:
    prompts = batch.prompts(smollm2, 8)
    assert [len(ids) for ids in prompts] == [batch.PROMPT_TOKENS] * 8
    assert len(set(map(tuple, prompts))) == 8
    with pytest.raises(BenchError, match="1000 prompts"):
        batch.prompts(smollm2, 1000)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    options = batch.Options.parse(["--model", "m"])
    with contextlib.ExitStack() as stack, pytest.raises(BenchError, match="No module named nothing"):
        batch.launch([sys.executable, "-m", "nothing"], options, tmp_path / "log", stack, lambda: False)
