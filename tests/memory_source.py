"""A KV source without a wire: serves planes that lie in memory, from a thread of its own, as a handoff does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from muser_decode.engine.source import Piece, SlotPool, SourceDone, SourceFailed, StagedChunk, StagingSlot

WAIT_S = 0.05


@dataclass
class MemorySource:
    """Stages chunks of `grid` tokens; fails before chunk `fail_at`, or stalls there while `stall` is set.

    It waits `pause_s` before each chunk, and adds `shift` to the positions that it names.
    `planes` holds each layer's keys and values as 16-bit words `[tokens, kv_heads, head_dim]`. Of a layer whose
    entry in `windows` is a number, a chunk carries no more than that many of its last tokens, in pieces of at most
    `cut` tokens. `events` records what the engine called.
    """

    planes: Sequence[tuple[np.ndarray, np.ndarray]]
    grid: int
    fail_at: int | None = None
    stall_at: int | None = None
    shift: int = 0
    pause_s: float = 0.0
    windows: Sequence[int | None] | None = None
    cut: int = 1 << 20
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = len(self.planes[0][0])
        self.cancelled = threading.Event()
        self.gone = threading.Event()
        self._news: queue.SimpleQueue[StagedChunk | SourceDone | SourceFailed] = queue.SimpleQueue()

    def begin(self, slots: SlotPool) -> None:
        self.events.append("begin")
        self._slots = slots
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def poll(self) -> StagedChunk | SourceDone | SourceFailed | None:
        try:
            return self._news.get_nowait()
        except queue.Empty:
            return None

    def cancel(self) -> None:
        self.events.append("cancel")
        self.cancelled.set()

    def _serve(self) -> None:
        for index, start in enumerate(range(0, self.tokens, self.grid)):
            self.cancelled.wait(self.pause_s)
            if index == self.fail_at:
                self._say(SourceFailed("producer_lost", 0.5, index, 100 * index, "h1"))
                break
            if index == self.stall_at:
                self.cancelled.wait()
            slot = self._acquire()
            if slot is None:
                break
            self._say(self._stage(slot, start, min(self.tokens, start + self.grid)))
        else:
            self._say(SourceDone(0.5, -(-self.tokens // self.grid), 1234, "h1"))
        self.cancelled.wait(60.0 if self.fail_at is None else 0.0)
        self._give_back()
        self.gone.set()

    def _acquire(self) -> StagingSlot | None:
        while not self.cancelled.is_set():
            slot = self._slots.acquire(WAIT_S)
            if slot is not None:
                return slot
        return None

    def _stage(self, slot: StagingSlot, start: int, stop: int) -> StagedChunk:
        pieces, offset = [], 0
        for layer, (k, v) in enumerate(self.planes):
            window = self.windows[layer] if self.windows else None
            first = start if window is None else max(start, stop - window)
            for a in range(first, stop, self.cut):
                b, at = min(stop, a + self.cut), []
                for plane in (k, v):
                    data = plane[a:b].tobytes()
                    slot.memory[offset : offset + len(data)] = data
                    at.append(offset)
                    offset += len(data)
                pieces.append(Piece(layer, a + self.shift, b + self.shift, *at))
        return StagedChunk(start + self.shift, stop + self.shift, slot, tuple(pieces))

    def _say(self, news: StagedChunk | SourceDone | SourceFailed) -> None:
        self._news.put(news)
        self._slots.wake()

    def _give_back(self) -> None:
        """Release chunks that were staged and never polled."""
        if self.cancelled.is_set():
            while not self._news.empty():
                news = self._news.get_nowait()
                if isinstance(news, StagedChunk):
                    self._slots.release(news.slot)
