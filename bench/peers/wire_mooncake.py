"""Mooncake's transfer engine over TCP, one side of it: the sink reads the source's registered memory."""

from __future__ import annotations

from typing import Any

from lines import serve
from mooncake.engine import TransferEngine
from wire_memory import MEMORY_NBYTES, cpu, digest, pieces, sink_memory, source_memory, timed

SIDE: dict[str, Any] = {}


def start(memory: Any) -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine does not start")
    if engine.register_memory(memory.ctypes.data, MEMORY_NBYTES):
        raise RuntimeError("the engine does not take the memory")
    SIDE.update(engine=engine, memory=memory)
    return engine


def source() -> dict[str, Any]:
    engine = start(source_memory())
    return {"address": [f"127.0.0.1:{engine.get_rpc_port()}", SIDE["memory"].ctypes.data]}


def sink(address: list[Any]) -> dict[str, Any]:
    start(sink_memory())
    SIDE["address"] = address
    return {}


def receive(nbytes: int) -> None:
    peer, remote = SIDE["address"]
    for at, size in pieces(nbytes):
        if SIDE["engine"].transfer_sync_read(peer, SIDE["memory"].ctypes.data + at, remote + at, size):
            raise RuntimeError("the transfer failed")


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
