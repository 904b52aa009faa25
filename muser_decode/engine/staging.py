"""The engine's side of staging: mlx buffers that other threads fill, and their installation into a cache."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from muser_decode.engine.cache import KVCache
from muser_decode.engine.contract import Cache
from muser_decode.engine.source import Piece, SlotPool, StagedChunk, StagingSlot
from muser_decode.engine.widening import widen_rows
from muser_decode.errors import StagedChunkInvalid
from muser_decode.numerics import KV_DTYPES, on_gpu
from muser_wire.geometry import Geometry


class Staging:
    """Preallocated buffers behind a `SlotPool`. Made on, and read by, the engine's thread alone."""

    def __init__(self, geometry: Geometry, slots: int, slot_nbytes: int, wake: Callable[[], None]) -> None:
        self._geometry = geometry
        elements = -(-slot_nbytes // geometry.element.nbytes)
        self._buffers = [mx.zeros((elements,), mx.uint16) for _ in range(slots)]
        mx.eval(self._buffers)
        # memoryview() asks mlx, so it is done here; afterwards writers touch plain memory. Its stub hides the buffer.
        memory = [memoryview(buffer).cast("B") for buffer in self._buffers]  # type: ignore[arg-type]
        slots_made = (StagingSlot(index, view) for index, view in enumerate(memory))
        self.pool = SlotPool(slots_made, wake, direct=not on_gpu())

    def install(self, chunk: StagedChunk, cache: Cache, tokens: int) -> None:
        """Write a chunk into a cache that wants positions [cache.length, tokens), and commit it.

        The slot is read completely when this returns, so it may be filled again.

        Raises:
            StagedChunkInvalid: the chunk does not continue the cache or does not cover it; nothing was written.
        """
        check_chunk(chunk, self._geometry, cache.length, tokens)
        if self.pool.direct and isinstance(cache, KVCache) and cache.arrays[0].dtype == mx.float32:
            self._install_here(chunk, cache)
        else:
            self._install_there(chunk, cache)
        cache.commit(chunk.stop)

    def _install_here(self, chunk: StagedChunk, cache: KVCache) -> None:
        """Write on this thread into memory that mlx shares: rows at these positions, which no other array shows yet."""
        shape = (self._geometry.kv_heads, self._geometry.head_dim)
        halves = np.frombuffer(chunk.memory, np.int16)
        for piece in chunk.pieces:
            into, dropped = cache.place(piece.layer, piece.start, piece.stop)
            rows = cache.arrays[piece.layer]
            mx.eval(rows)
            target = np.frombuffer(memoryview(rows).cast("B"), np.float32).reshape(rows.shape)  # type: ignore[arg-type]
            count = (piece.stop - piece.start) * shape[0] * shape[1]
            for plane, offset in enumerate((piece.k_offset_nbytes, piece.v_offset_nbytes)):
                source = halves[offset // 2 : offset // 2 + count].reshape(-1, *shape)[dropped:]
                heads = slice(plane * shape[0], (plane + 1) * shape[0])
                widen_rows(source, target[heads, into], self._geometry.element)

    def _install_there(self, chunk: StagedChunk, cache: Cache) -> None:
        """Have mlx copy from the slot."""
        if chunk.beside is not None:
            chunk.slot.memory[: len(chunk.beside)] = chunk.beside
        buffer = self._buffers[chunk.slot.index]
        for piece in chunk.pieces:
            k, v = self._plane(buffer, piece, piece.k_offset_nbytes), self._plane(buffer, piece, piece.v_offset_nbytes)
            cache.install(piece.layer, piece.start, k, v)
        mx.eval(cache.arrays)

    def _plane(self, buffer: mx.array, piece: Piece, offset_nbytes: int) -> mx.array:
        """Return a view of one plane in the slot, `[tokens, kv_heads, head_dim]` in the KV element type."""
        geometry, tokens = self._geometry, piece.stop - piece.start
        start = offset_nbytes // geometry.element.nbytes
        bits = buffer[start : start + tokens * geometry.kv_heads * geometry.head_dim]
        return bits.view(KV_DTYPES[geometry.element]).reshape(tokens, geometry.kv_heads, geometry.head_dim)


def check_chunk(chunk: StagedChunk, geometry: Geometry, length: int, tokens: int) -> None:
    """Check that a chunk starts at `length`, ends within `tokens`, and covers each layer once from inside its slot.

    A layer with a window is covered when the chunk holds all of its tokens that lie in the window before
    the chunk's end: later queries see no others. So every chunk's end is a place to go on from.

    Raises:
        StagedChunkInvalid: it does not; the message names the first difference.
    """
    if chunk.start != length:
        raise StagedChunkInvalid(f"staged chunk starts at {chunk.start}, the cache ends at {length}")
    if not chunk.start < chunk.stop <= tokens:
        raise StagedChunkInvalid(f"staged chunk ends at {chunk.stop}, the prompt at {tokens}")
    ends = [chunk.start if window is None else max(chunk.start, chunk.stop - window) for window in geometry.windows]
    for piece in chunk.pieces:
        _check_piece(piece, chunk, geometry)
        if piece.start != ends[piece.layer]:
            raise StagedChunkInvalid(f"layer {piece.layer} goes on at {piece.start}, expected {ends[piece.layer]}")
        ends[piece.layer] = piece.stop
    for layer, end in enumerate(ends):
        if end != chunk.stop:
            raise StagedChunkInvalid(f"layer {layer} ends at {end}, the chunk at {chunk.stop}")


def _check_piece(piece: Piece, chunk: StagedChunk, geometry: Geometry) -> None:
    """Check that a piece names a layer and lies within its chunk and its slot."""
    nbytes = (piece.stop - piece.start) * geometry.plane_token_nbytes
    offsets = (piece.k_offset_nbytes, piece.v_offset_nbytes)
    fits = all(0 <= offset <= len(chunk.memory) - nbytes and offset % 2 == 0 for offset in offsets)
    if not (0 <= piece.layer < len(geometry.windows) and piece.start < piece.stop <= chunk.stop and fits):
        raise StagedChunkInvalid(f"piece {piece} lies outside its chunk or slot")
