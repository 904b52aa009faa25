"""A stand-in for both nodes: their flags, ready files and exit codes, with the standard library alone.

FAKE_NODE in the environment picks a fault. The decode role answers `remote` while the producer's port
takes connections, and `local` afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def is_fault(name: str) -> bool:
    return os.environ.get("FAKE_NODE") == name


def main() -> int:
    role = sys.argv.pop(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    for flag in (
        "--config",
        "--model",
        "--host",
        "--lane",
        "--dtype",
        "--kv",
        "--threads",
        "--ready-file",
        "--drain-s",
        "--cache-memory-mb",
    ):
        parser.add_argument(flag)
    for flag in ("--control-port", "--data-port") if role == "prefill" else ("--port", "--producer", "--route"):
        parser.add_argument(flag)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3 if is_fault(f"{role}-stops-badly") else 0))
    print(f"{role} starts with {arguments.dtype}", file=sys.stderr, flush=True)
    if is_fault(f"{role}-ends"):
        for number in range(100):
            print(f"line {number}", file=sys.stderr)
        return 7
    if is_fault(f"{role}-never-ready"):
        signal.pause()
    return prefill(arguments) if role == "prefill" else decode(arguments)


def publish(path: str, facts: dict[str, int]) -> None:
    temporary = Path(path + ".tmp")
    temporary.write_text(json.dumps({"pid": os.getpid(), **facts}))
    temporary.rename(path)


def prefill(arguments: argparse.Namespace) -> int:
    with socket.create_server(("127.0.0.1", int(arguments.control_port))) as server:
        publish(arguments.ready_file, {"control_port": server.getsockname()[1], "data_port": 1})
        while True:
            server.accept()[0].close()


def decode(arguments: argparse.Namespace) -> int:
    server = HTTPServer(("127.0.0.1", int(arguments.port)), Handler)
    Handler.producer = arguments.producer
    publish(arguments.ready_file, {"port": server.server_port})
    server.serve_forever()
    return 0


def reachable(producer: str) -> bool:
    host, _, port = producer.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    producer = ""

    def do_GET(self) -> None:
        self.answer("application/json", json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if is_fault("decode-ends-in-the-middle"):
            os._exit(9)
        remote = reachable(self.producer) and not is_fault("never-remote")
        text = "The reader reads." if remote or not is_fault("texts-differ") else "The writer reads."
        chunks: list[dict[str, object]] = [
            {"choices": [{"delta": {"content": piece}}]} for piece in text.partition(" ")
        ]
        account = {"route": "remote" if remote else "local", "reason": "" if remote else "producer unreachable"}
        chunks.append({"choices": [], "usage": {"prompt_tokens": request["max_tokens"]}, "muser": account})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.answer("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


if __name__ == "__main__":
    sys.exit(main())
