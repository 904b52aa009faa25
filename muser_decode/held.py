"""What this node holds of a prompt, as a KV source: blocks from memory or disk first, then the rest.

Its thread looks the prompt up, reads and verifies blocks, and fills staging slots, as ingest does with a
handoff; the engine's thread installs both alike. Where the rest comes from is decided when it is known how much
is held: a handoff that brings only what is missing, or this node.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from muser_decode.engine.source import HeldEnded, KVSource, News, Origin, Piece, SlotPool, StagedChunk, StagingSlot
from muser_decode.keeper import Keeper
from muser_wire.geometry import Geometry
from muser_wire.kvpack.block import Block, block_layout, first_held, pack_ids, payload_nbytes
from muser_wire.kvpack.store import Fetched, Tier

WAIT_S = 0.1
"""How often, in seconds, a wait for a slot looks whether it was cancelled."""

ORIGINS = {Tier.MEMORY: Origin.MEMORY, Tier.DISK: Origin.DISK}

Rest = KVSource | str
"""A handoff that brings what is not held, or why this node computes it."""

_log = logging.getLogger(__name__)


class HeldSource:
    """See `muser_decode.engine.source.KVSource`. `rest` is asked once, with the number of tokens that are held."""

    def __init__(self, keeper: Keeper, prompt_ids: Sequence[int], rest: Callable[[int], Rest]) -> None:
        self._keeper = keeper
        self._ids = prompt_ids
        self._ask_rest = rest
        self._lock = threading.Lock()
        self._posted: deque[StagedChunk | tuple[str, Rest]] = deque()
        self._cancelled = False
        self._slots: SlotPool | None = None
        self._rest: KVSource | None = None
        self._held_tokens = 0

    def begin(self, slots: SlotPool) -> None:
        """See `KVSource`."""
        self._slots = slots
        threading.Thread(target=self._run, args=(slots,), name="held", daemon=True).start()

    def poll(self) -> News | None:
        """See `KVSource`."""
        if self._rest is not None:
            return self._rest.poll()
        with self._lock:
            posted = self._posted.popleft() if self._posted else None
        return self._end(*posted) if isinstance(posted, tuple) else posted

    def cancel(self) -> None:
        """See `KVSource`."""
        if self._rest is not None:
            self._rest.cancel()
        with self._lock:
            self._cancelled = True
            unpolled, self._posted = self._posted, deque()
        for item in unpolled:
            if isinstance(item, StagedChunk) and self._slots is not None:
                self._slots.release(item.slot)

    def _end(self, held_reason: str, rest: Rest) -> HeldEnded:
        if isinstance(rest, str):
            return HeldEnded(held_reason, rest)
        self._rest = rest
        if self._slots is not None:
            rest.begin(self._slots)
        return HeldEnded(held_reason, None)

    def _run(self, slots: SlotPool) -> None:
        try:
            reason = self._serve(slots)
        except Exception as error:  # outermost: whatever broke, the prompt is computed from where its cache ends
            _log.exception("held_failed")
            reason = f"internal: {type(error).__name__}"
        if not self._cancelled:
            self._post(slots, (reason, self._asked_rest()))

    def _asked_rest(self) -> Rest:
        try:
            return self._ask_rest(self._held_tokens)
        except Exception as error:  # outermost: without an answer the request would wait for ever
            _log.exception("rest_failed")
            return f"internal: {type(error).__name__}"

    def _serve(self, slots: SlotPool) -> str:
        """Post what is held; return why there is no more."""
        store = self._keeper.store
        self._keeper.settle(self._ids)
        # The last prompt token is left to the first decode step.
        match = store.match(pack_ids(self._ids[:-1]))
        for part in match.blocks:
            fetched = store.fetch(part.head)
            if fetched is None:
                return f"the block at token {part.head.start} was lost or damaged"
            slot = self._slot(slots)
            if slot is None:
                return "cancelled"
            if payload_nbytes(store.geometry, part.head.start, part.stop) > len(slot.memory):
                slots.release(slot)
                return "a block does not fit a staging slot"
            self._post(slots, staged(slots, slot, store.geometry, fetched, part.stop))
            self._held_tokens = part.stop
        return match.reason

    def _slot(self, slots: SlotPool) -> StagingSlot | None:
        while not self._cancelled:
            slot = slots.acquire(WAIT_S)
            if slot is not None:
                return slot
        return None

    def _post(self, slots: SlotPool, item: StagedChunk | tuple[str, Rest]) -> None:
        with self._lock:
            polled = not self._cancelled
            if polled:
                self._posted.append(item)
        if not polled and isinstance(item, StagedChunk):
            slots.release(item.slot)
        slots.wake()


def staged(slots: SlotPool, slot: StagingSlot, geometry: Geometry, fetched: Fetched, stop: int) -> StagedChunk:
    """Return a block's tokens up to `stop` as a chunk: where they lie, or copied into the slot."""
    block, origin = fetched.block, ORIGINS[fetched.tier]
    if slots.direct:
        pieces = pieces_in_place(geometry, block, stop)
        return StagedChunk(block.head.start, stop, slot, pieces, origin, block, beside=block.payload)
    return StagedChunk(block.head.start, stop, slot, fill(slot, geometry, block, stop), origin, block)


def pieces_in_place(geometry: Geometry, block: Block, stop: int) -> tuple[Piece, ...]:
    """Return where the planes of a block's tokens up to `stop` lie in its payload; see `fill`."""
    pieces = []
    for pair in block_layout(geometry, block.head.start, block.head.stop):
        first = first_held(geometry.windows[pair.layer], block.head.start, stop)
        k_offset = pair.offset + (first - pair.start) * geometry.plane_token_nbytes
        pieces.append(Piece(pair.layer, first, stop, k_offset, k_offset + pair.nbytes // 2))
    return tuple(pieces)


def fill(slot: StagingSlot, geometry: Geometry, block: Block, stop: int) -> tuple[Piece, ...]:
    """Copy a block's planes for tokens up to `stop` into a slot; return where they lie.

    Of a layer with a window, the tokens within the window before `stop`.
    """
    # numpy copies without holding the interpreter, which the engine's thread needs meanwhile.
    source, target = np.frombuffer(block.payload, np.uint8), np.frombuffer(slot.memory, np.uint8)
    row, start, offset = geometry.plane_token_nbytes, block.head.start, 0
    pieces = []
    for pair in block_layout(geometry, start, block.head.stop):
        first = first_held(geometry.windows[pair.layer], start, stop)
        nbytes, skipped = (stop - first) * row, (first - pair.start) * row
        at = []
        for plane in (pair.offset, pair.offset + pair.nbytes // 2):
            np.copyto(target[offset : offset + nbytes], source[plane + skipped : plane + skipped + nbytes])
            at.append(offset)
            offset += nbytes
        pieces.append(Piece(pair.layer, first, stop, *at))
    return tuple(pieces)
