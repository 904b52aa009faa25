from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.driver import BenchError
from bench.servers import Server, Talk, cached_by_log, cached_by_usage, converse, free_port

FAKE = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self):
            Handler.asked += 1
            self.send_response(200 if Handler.asked > 2 else 503); self.end_headers()

        def do_POST(self):
            if Handler.asked <= 2:
                self.send_response(503); self.end_headers(); return
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turns = len(body["messages"])
            print(f"Llama.generate: {turns} prefix-match hit, remaining 1", file=sys.stderr, flush=True)
            self.send_response(200); self.end_headers()
            usage = {"prompt_tokens": turns + int(sys.argv[2]), "prompt_tokens_details": {"cached_tokens": turns - 1}}
            events = [
                {"choices": [{"delta": {"role": "assistant"}}]},
                {"choices": [{"delta": {"content": "Hel"}}]},
                {"choices": [{"delta": {"content": f"lo {turns}"}}]},
                {"choices": [], "usage": usage},
            ]
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.write(b"data: [DONE]\\n\\n")

    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Words:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TALK = Talk(Words(), 20, 3, 4)  # type: ignore[arg-type]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers that answer alike; one is asked through its usage, the other through its log."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    made = []
    for name, cached in (("by usage", cached_by_usage), ("by log", cached_by_log)):
        port = free_port()
        command = [sys.executable, str(script), str(port), "0"]
        made.append(Server(name, command, tmp_path / f"{name}.log", port, 1, cached))
    yield made
    for server in made:
        server.close()


def test_every_server_gets_the_same_messages_with_the_first_one_s_replies(servers: list[Server]) -> None:
    converse(servers, TALK)
    for server in servers:
        # System and first message, then two more each turn.
        assert [answer["prompt"] for answer in server.answers] == [2, 4, 6]
        assert [answer["text"] for answer in server.answers] == ["Hello 2", "Hello 4", "Hello 6"]
        assert all(answer["first_s"] > 0 for answer in server.answers)
    assert [answer["cached"] for answer in servers[0].answers] == [1, 3, 5]
    assert [answer["cached"] for answer in servers[1].answers] == [2, 4, 6]


def test_prompts_of_other_lengths_are_refused(servers: list[Server], tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(tmp_path / "fake.py"), str(port), "9"]
    other = Server("other", command, tmp_path / "other.log", port, 1, cached_by_usage)
    try:
        with pytest.raises(BenchError, match="other lengths"):
            converse([servers[0], other], TALK)
    finally:
        other.close()


def test_a_server_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no model')"]
    server = Server("broken", command, tmp_path / "broken.log", free_port(), 1, cached_by_usage)
    with pytest.raises(BenchError, match=r"broken does not answer(.|\n)*no model"):
        server.wait()
    server.close()


def test_what_is_cached_is_read_as_each_server_tells_it() -> None:
    assert cached_by_usage(json.loads('{"prompt_tokens_details": null}'), "") == 0
    assert cached_by_log({"prompt_tokens": 9}, "x\nLlama.generate: full prompt already cached, skipping reset") == 9
    assert cached_by_log({}, "3 prefix-match found but partial kv removal not supported") == 0
