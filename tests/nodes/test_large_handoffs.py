"""A handoff of more than 4 GiB, over real gRPC: no count or place of it fits 32 bits."""

from __future__ import annotations

from typing import Any

import pytest

from bench.synthetic import MemoryDecoder, PlaneMemory, Shape, Sink, Source

SHAPE = Shape(layers=4, kv_heads=8, head_dim=256, chunk_tokens=1024)
"""32 KiB a token."""

TOKENS = (1 << 32) // (32 << 10) + 1000


@pytest.mark.slow
def test_more_than_four_gib_cross_in_one_handoff() -> None:
    memory = PlaneMemory(SHAPE)
    source = Source(SHAPE, decoder=MemoryDecoder(SHAPE, memory))
    sink = Sink(SHAPE, source.server.control_port)
    wrong, tokens = [], 0

    def commit(chunk: Any) -> None:
        nonlocal tokens
        assert chunk.start == tokens
        tokens = chunk.stop
        for piece in (chunk.pieces[0], chunk.pieces[-1]):
            expected = memory.plane(piece.layer, False, piece.start, piece.start + 1).tobytes()
            if chunk.memory[piece.k_offset_nbytes : piece.k_offset_nbytes + len(expected)] != expected:
                wrong.append(piece)

    try:
        moved = sink.handoff(TOKENS + 1, commit)
    finally:
        sink.close()
        source.close()
    assert (moved, tokens, wrong) == (TOKENS * 4 * 2 * 8 * 256 * 2, TOKENS, [])
    assert moved > 1 << 32
