"""Our wire, one side of it: the producer's own service over planes from memory, or the consumer's own ingest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lines import serve

from bench.synthetic import PlaneMemory, Shape, Sink, Source
from muser_wire.trace import configure_trace, now_ns, span

SIDES: dict[str, Any] = {}
"""What this process holds: its shape, and a source or a sink."""


def source(shape: dict[str, int] | None = None, max_rate: float = 0.0, trace: str = "") -> dict[str, Any]:
    SIDES["shape"] = Shape(**shape or {})
    SIDES["source"] = Source(SIDES["shape"], max_rate)
    if trace:
        configure_trace(Path(trace))
    return {"address": SIDES["source"].server.control_port}


def sink(address: int, shape: dict[str, int] | None = None, trace: str = "") -> dict[str, Any]:
    SIDES["shape"] = Shape(**shape or {})
    SIDES["sink"] = Sink(SIDES["shape"], address)
    if trace:
        configure_trace(Path(trace))
    return {}


def compute(chunk_s: float) -> dict[str, Any]:
    """Let a chunk's computation take so long."""
    SIDES["source"].decoder.chunk_s = chunk_s
    return {}


def check(nbytes: int) -> dict[str, Any]:
    """Run one handoff and compare every plane of its chunks with what the source must have sent."""
    memory, geometry = PlaneMemory(SIDES["shape"]), SIDES["shape"].geometry
    wrong = 0

    def compare(chunk: Any) -> None:
        nonlocal wrong
        for piece in chunk.pieces:
            half = (piece.stop - piece.start) * geometry.plane_token_nbytes
            for is_value, offset in ((False, piece.k_offset_nbytes), (True, piece.v_offset_nbytes)):
                plane = memory.plane(piece.layer, is_value, piece.start, piece.stop)
                wrong += bytes(chunk.slot.memory[offset : offset + half]) != plane.tobytes()

    moved = SIDES["sink"].handoff(SIDES["shape"].prompt_tokens(nbytes), compare)
    return {"wrong": wrong, "nbytes": moved}


def pull(nbytes: int) -> dict[str, Any]:
    """Run one handoff. The slots that it was decrypted into are free again when it is sealed."""
    cpu_s, started = time.process_time(), time.perf_counter()
    moved = SIDES["sink"].handoff(SIDES["shape"].prompt_tokens(nbytes), lambda chunk: None)
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s, "nbytes": moved}


def traced(prompt_tokens: int) -> dict[str, Any]:
    """Run one handoff whose chunks are copied out of their slots, as an engine does; say when it was sealed."""
    target = bytearray(SIDES["shape"].token_nbytes * SIDES["shape"].chunk_tokens)

    def commit(chunk: Any) -> None:
        started_ns = now_ns()
        nbytes = (chunk.stop - chunk.start) * SIDES["shape"].token_nbytes
        memoryview(target)[:nbytes] = chunk.slot.memory[:nbytes]
        span("commit", chunk.start // SIDES["shape"].chunk_tokens, started_ns)

    SIDES["sink"].handoff(prompt_tokens, commit)
    return {"sealed_ns": SIDES["sink"].news_ns}


def cpu() -> dict[str, Any]:
    return {"cpu_s": time.process_time()}


if __name__ == "__main__":
    serve(
        {"source": source, "sink": sink, "compute": compute, "check": check, "pull": pull, "traced": traced, "cpu": cpu}
    )
