"""Where a generation's keys and values come from when not computed here: the contract with a KV source.

No mlx in this module: everything here is touched by a source's own thread. Bytes cross between the
threads through *staging slots*, preallocated memory that the source fills and the engine installs.

Whoever holds a slot releases it, exactly once. A source holds it from `SlotPool.acquire` until `poll`
has returned the chunk in it; from then on the engine does. So a source that is cancelled, or fails,
gives back what it still holds (the slot being filled and those of chunks never polled), after its last
write. A source that keeps a slot starves every later handoff.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from muser_decode.keeper import Slab, Words
from muser_wire.geometry import Geometry
from muser_wire.kvpack.block import Block


@dataclass(frozen=True, eq=False)
class StagingSlot:
    """Preallocated memory of one staged chunk. `memory` is flat, writable, of format "B", with arbitrary content."""

    index: int
    memory: memoryview


class SlotPool:
    """The free staging slots of an engine, shared by all its sources. Every method is thread-safe and calls no mlx."""

    def __init__(self, slots: Iterable[StagingSlot], wake: Callable[[], None], *, direct: bool = False) -> None:
        self.direct = direct
        """Whether chunks are installed from any memory, not only from slots."""
        self.keeps = False
        """Whether chunks are saved: then a source had better copy their rows on its own thread."""
        self._free: queue.SimpleQueue[StagingSlot | None] = queue.SimpleQueue()
        self._wake = wake
        self._closed = False
        for slot in slots:
            self._free.put(slot)

    def acquire(self, timeout_s: float) -> StagingSlot | None:
        """Return a free slot, or None when none became free within `timeout_s` seconds or the pool is closed."""
        if self._closed:
            return None
        try:
            slot = self._free.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if slot is None:
            self._free.put(None)
        return slot

    def release(self, slot: StagingSlot) -> None:
        """Give a slot back; the caller neither reads nor writes it any more."""
        self._free.put(slot)

    def wake(self) -> None:
        """Tell the engine that `poll` has something new."""
        self._wake()

    def close(self) -> None:
        """Refuse every later `acquire` and end those that wait; the engine stops."""
        self._closed = True
        self._free.put(None)


@dataclass(frozen=True)
class Piece:
    """The two planes of one layer for tokens [start, stop), absolute positions, inside a slot.

    Each plane is row-major `[stop - start, kv_heads, head_dim]` in the KV element type, little-endian.
    The offsets are even.
    """

    layer: int
    start: int
    stop: int
    k_offset_nbytes: int
    v_offset_nbytes: int


class Origin(Enum):
    """Where the tokens of a staged chunk come from: this node's memory or disk, or a producer."""

    MEMORY = "memory"
    DISK = "disk"
    PEER = "peer"


@dataclass(frozen=True)
class StagedChunk:
    """A whole verified chunk: tokens [start, stop) of every layer, each layer covered once by its pieces, in order.

    Of a layer with a window that is shorter than the chunk: the window before `stop`, no more. `block` is what
    it was copied from, if this node held it; `producer` is the name of who sent it, if one did. `beside` is the memory
    in which the pieces lie, if that is not the slot's: only where the pool is `direct`. `slab` is a copy of its rows
    to be saved, if its source made one.
    """

    start: int
    stop: int
    slot: StagingSlot
    pieces: tuple[Piece, ...]
    origin: Origin = Origin.PEER
    block: Block | None = None
    producer: str = ""
    beside: memoryview | None = None
    slab: Slab | None = None

    @property
    def memory(self) -> memoryview:
        """Where the pieces lie."""
        return self.slot.memory if self.beside is None else self.beside


def copied_rows(chunk: StagedChunk, ids: bytes, geometry: Geometry) -> Slab:
    """Return the rows of a chunk of these tokens as they are saved, copied out of its slot."""
    words, row = np.frombuffer(chunk.memory, np.uint16), geometry.kv_heads * geometry.head_dim
    planes: list[tuple[list[Words], list[Words]]] = [([], []) for _ in geometry.windows]
    firsts = [chunk.stop] * len(planes)
    for piece in chunk.pieces:
        firsts[piece.layer] = min(firsts[piece.layer], piece.start)
        for parts, offset in zip(planes[piece.layer], (piece.k_offset_nbytes, piece.v_offset_nbytes), strict=True):
            parts.append(words[offset // 2 : offset // 2 + (piece.stop - piece.start) * row])
    gathered = np.concatenate([part for k, v in planes for part in (*k, *v)])
    return Slab(chunk.start, chunk.stop, ids, tuple(firsts), gathered)


@dataclass(frozen=True)
class SourceDone:
    """The handoff ended with a verified seal; every chunk has been polled. Counts are of the whole handoff.

    `reused_tokens` leading tokens of the prompt the producer had computed before [7.7]. `broken` says why an earlier
    handoff broke off, some of whose chunks have been polled.
    """

    wire_s: float
    segments_verified: int
    payload_nbytes: int
    handoff_id: str
    reused_tokens: int = 0
    broken: str = ""


@dataclass(frozen=True)
class SourceFailed:
    """The handoff ended otherwise. `reason` says why in a few words, fit for a response header and a log; `code` in
    one that is stable.

    Chunks polled before this stay valid. Counts are of what was verified.
    """

    reason: str
    wire_s: float
    segments_verified: int
    payload_nbytes: int
    handoff_id: str
    code: str = "internal"


@dataclass(frozen=True)
class HeldEnded:
    """Every chunk that this node held has been polled. `held_reason` says why there are no more.

    `rest_reason` None: the source goes on with a handoff. Otherwise nothing is polled any more, the rest is for
    this node to compute, and the text says why.
    """

    held_reason: str
    rest_reason: str | None


News = StagedChunk | HeldEnded | SourceDone | SourceFailed
"""What a source can say."""


class KVSource(Protocol):
    """One handoff, as the engine sees it. All three methods are called on the engine's thread and never block.

    Chunks come in order from position 0, each starting where the one before stopped, on the grid; the
    last may end early, at the held-back last prompt token. What this node held comes first, and may end
    anywhere. After `SourceDone`, `SourceFailed` or `cancel` nothing is polled any more.
    """

    def begin(self, slots: SlotPool) -> None:
        """Start. Called once, when the generation is admitted; the source keeps `slots`."""

    def poll(self) -> News | None:
        """Return the next thing that happened, or None. The source calls `slots.wake()` when there is one."""

    def cancel(self) -> None:
        """End the handoff early. May come twice, or before `begin`, which then never comes.

        The source releases what it holds, on its own thread if that is where the last write happens.
        """
