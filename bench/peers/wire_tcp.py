"""A raw TCP stream, one side of it: no framing, no checks, received into memory that was made before."""

from __future__ import annotations

import socket
import threading
from typing import Any

from lines import serve
from wire_memory import cpu, digest, pieces, sink_memory, source_memory, timed

PIECE_NBYTES = 1 << 20
SIDE: dict[str, Any] = {}


def source() -> dict[str, Any]:
    SIDE["memory"] = source_memory()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send, args=(listener,), daemon=True).start()
    return {"address": listener.getsockname()[1]}


def send(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    memory = memoryview(SIDE["memory"])
    while request := connection.recv(8, socket.MSG_WAITALL):
        for at, size in pieces(int.from_bytes(request, "big"), PIECE_NBYTES):
            connection.sendall(memory[at : at + size])


def sink(address: int) -> dict[str, Any]:
    SIDE["socket"] = socket.create_connection(("127.0.0.1", address))
    SIDE["memory"] = sink_memory()
    return {}


def receive(nbytes: int) -> None:
    connection, memory = SIDE["socket"], memoryview(SIDE["memory"])
    connection.sendall(nbytes.to_bytes(8, "big"))
    for at, size in pieces(nbytes, PIECE_NBYTES):
        done = 0
        while done < size:
            done += connection.recv_into(memory[at + done : at + size])


def check(nbytes: int) -> dict[str, Any]:
    receive(nbytes)
    return digest(SIDE["memory"], nbytes)


if __name__ == "__main__":
    serve(
        {
            "source": source,
            "sink": sink,
            "check": check,
            "pull": lambda nbytes: timed(receive, nbytes),
            "digest": lambda nbytes: digest(SIDE["memory"], nbytes),
            "cpu": cpu,
        }
    )
