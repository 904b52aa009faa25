"""The keeper: a thread that turns copied rows into blocks and puts them into the store. No mlx here.

The engine's thread only hands over slabs; assembling, hashing and writing to disk happen here. When the keeper
falls behind, requests go unsaved: nothing waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import (
    ID_NBYTES,
    Block,
    BlockHead,
    block_layout,
    first_held,
    make_block,
    pack_ids,
    payload_nbytes,
)
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore, Kept

MAX_PENDING_NBYTES = 512 << 20
"""Copied rows that may wait to become blocks, and blocks that may wait for the disk: a few chunks of a large model."""

SETTLE_S = 0.25
"""How long, in seconds, a prompt waits for the end of the request that it continues to be in the store."""

_log = logging.getLogger(__name__)

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Slab:
    """Rows of tokens [start, stop), within one chunk, in host memory.

    `words` holds for each layer the keys, then the values, of tokens [firsts[layer], stop), unpadded.
    """

    start: int
    stop: int
    ids: bytes
    firsts: tuple[int, ...]
    words: Words

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return int(self.words.nbytes)


@dataclass(frozen=True)
class HeldPart:
    """The tokens of a block below `stop`, with which another block begins."""

    block: Block
    stop: int

    def slab(self, geometry: Geometry) -> Slab:
        """Return their rows; of a window those that a longer block can need."""
        head, row = self.block.head, geometry.kv_heads * geometry.head_dim
        words = np.frombuffer(self.block.payload, np.uint16)
        firsts, parts = [], []
        for pair in block_layout(geometry, head.start, head.stop):
            first = first_held(geometry.windows[pair.layer], head.start, self.stop)
            planes = words[pair.offset // 2 : (pair.offset + pair.nbytes) // 2].reshape(2, pair.stop - pair.start, row)
            parts.append(planes[:, first - pair.start : self.stop - pair.start].reshape(-1))
            firsts.append(first)
        ids = head.ids[: (self.stop - head.start) * ID_NBYTES]
        return Slab(head.start, self.stop, ids, tuple(firsts), np.concatenate(parts))


class Assembly:
    """The blocks of one request in the making, from `prefix` (packed ids, ending on the grid) on.

    The first of them begins with `held`, if that is given. What comes after `prefilled` tokens is marked as
    decoded.
    """

    def __init__(
        self, namer: Namer, geometry: Geometry, prefix: bytes, prefilled: int, held: HeldPart | None = None
    ) -> None:
        self._namer, self._geometry, self._prefilled, self._held = namer, geometry, prefilled, held
        self._parent: Digest = namer.root
        for self._parent, *_ in namer.chain(prefix):
            pass
        self._start = len(prefix) // ID_NBYTES
        self._slabs: list[Slab] = []
        self.nbytes = 0

    def add(self, slab: Slab) -> Block | None:
        """Take the rows that come next; return the block that they complete, if they do.

        Raises:
            BlockInvalid: they do not come next.
        """
        held, self._held = self._held, None
        if held is not None:
            self._slabs.append(held.slab(self._geometry))
            self.nbytes += self._slabs[0].nbytes
        at = self._slabs[-1].stop if self._slabs else self._start
        if slab.start != at:
            raise BlockInvalid(f"rows of token {slab.start} came when those of {at} were due")
        self._slabs.append(slab)
        self.nbytes += slab.nbytes
        return self._finish() if slab.stop % self._namer.chunk_tokens == 0 else None

    def end(self) -> Block | None:
        """Return what is left as a tail, if anything is."""
        return self._finish() if self._slabs else None

    def _finish(self) -> Block:
        slabs, stop = self._slabs, self._slabs[-1].stop
        ids = b"".join(slab.ids for slab in slabs)
        name = self._namer.name(self._parent, self._start, ids)
        decoded_from = max(self._start, self._prefilled) if stop > self._prefilled else None
        head = BlockHead(name, self._parent, self._start, ids, decoded_from)
        block = make_block(self._geometry, head, _gather(self._geometry, slabs).data)
        self._parent, self._start, self._slabs, self.nbytes = name, stop, [], 0
        return block


def _gather(geometry: Geometry, slabs: Sequence[Slab]) -> npt.NDArray[np.uint8]:
    """Return a block's payload out of the slabs that cover it.

    Raises:
        BlockInvalid: they lack rows that the block holds.
    """
    start, stop = slabs[0].start, slabs[-1].stop
    row = geometry.kv_heads * geometry.head_dim
    payload = np.empty(payload_nbytes(geometry, start, stop), np.uint8)
    words = payload.view(np.uint16)
    offsets = [0] * len(slabs)
    for pair in block_layout(geometry, start, stop):
        target = words[pair.offset // 2 : (pair.offset + pair.nbytes) // 2].reshape(2, pair.stop - pair.start, row)
        at = pair.start
        for index, slab in enumerate(slabs):
            first = slab.firsts[pair.layer]
            source = slab.words[offsets[index] :][: 2 * (slab.stop - first) * row].reshape(2, slab.stop - first, row)
            offsets[index] += source.size
            if slab.stop <= at:
                continue
            if first > at:
                raise BlockInvalid(f"layer {pair.layer} lacks rows of token {at}")
            target[:, at - pair.start : slab.stop - pair.start] = source[:, at - first :]
            at = slab.stop
    return payload


class Saving:
    """One request's way into the store. The engine's thread adds slabs and ends it; the keeper does the rest."""

    def __init__(self, keeper: Keeper, assembly: Assembly, prompt: bytes) -> None:
        self._keeper = keeper
        self._assembly: Assembly | None = assembly
        self.prompt = prompt
        self.dropped = False

    @property
    def pending_nbytes(self) -> int:
        """Bytes of rows that have not become a block."""
        return self._assembly.nbytes if self._assembly is not None else 0

    def advance(self, slab: Slab | None) -> Block | None:
        """On the keeper's thread: take rows, or the end; return the block that is complete with them, if any.

        Raises:
            BlockInvalid: the rows do not fit those before.
        """
        assembly = self._assembly
        if slab is None or self.dropped:
            self._assembly = None
        if assembly is None or self.dropped:
            return None
        return assembly.end() if slab is None else assembly.add(slab)

    def add(self, slab: Slab) -> None:
        """Hand over rows. The saving is dropped when the keeper is too far behind."""
        self._keeper.take(self, slab)

    def close(self) -> None:
        """Say that the request has ended and its last rows are on their way."""
        self._keeper.note_end(self)

    def end(self) -> None:
        """Say that all rows were added."""
        self._keeper.take(self, None)


class Keeper:
    """Owns the thread that puts blocks into `store`. Methods may be called on any thread."""

    def __init__(self, store: BlockStore, max_pending_nbytes: int = MAX_PENDING_NBYTES) -> None:
        self.store = store
        self._max_pending_nbytes = max_pending_nbytes
        self._news = threading.Condition()
        self._slabs: deque[tuple[Saving, Slab | None]] = deque()
        self._unsaved: deque[Kept] = deque()
        self._ending: set[Saving] = set()
        self._pending_nbytes = self._unsaved_nbytes = 0
        self._working = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self.dropped = 0
        """Requests that were not, or not wholly, saved because the keeper was behind or rows were missing."""

        self.undersaved = 0
        """Blocks that the disk was too slow for."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Save what was handed over, for at most `timeout_s` seconds, and end the thread."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def saving(self, ids: Sequence[int], start: int, prefilled: int, held: HeldPart | None = None) -> Saving:
        """Return a saving of a request with these leading ids, from token `start` on, a boundary of the grid.

        Of the rows, those below `prefilled` come from prefill, and the first ones are `held` already.
        """
        store = self.store
        assembly = Assembly(store.namer, store.geometry, pack_ids(ids[:start]), prefilled, held)
        return Saving(self, assembly, pack_ids(ids))

    def settle(self, ids: Sequence[int], timeout_s: float = SETTLE_S) -> None:
        """Wait until every ended request whose prompt these ids go on from is in memory, for at most `timeout_s`.

        Those that end while this waits are not waited for.
        """
        packed = pack_ids(ids)
        with self._news:
            before = {saving for saving in self._ending if packed.startswith(saving.prompt)}
            self._news.wait_for(lambda: before.isdisjoint(self._ending), timeout=timeout_s)

    def idle(self, timeout_s: float) -> bool:
        """Wait until everything handed over is saved; return whether it is."""
        with self._news:
            return self._news.wait_for(
                lambda: not (self._slabs or self._unsaved or self._ending or self._working), timeout=timeout_s
            )

    def take(self, saving: Saving, slab: Slab | None) -> None:
        """Queue rows of a saving, or its end; see `Saving`."""
        with self._news:
            if slab is not None:
                if saving.dropped:
                    return
                if self._pending_nbytes + slab.nbytes > self._max_pending_nbytes:
                    saving.dropped = True
                    self.dropped += 1
                    _log.info("saving_dropped pending_nbytes=%d", self._pending_nbytes)
                    return
                self._pending_nbytes += slab.nbytes
            self._slabs.append((saving, slab))
            self._news.notify_all()

    def note_end(self, saving: Saving) -> None:
        """Note that a request has ended; see `Saving`."""
        with self._news:
            self._ending.add(saving)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._slabs or self._unsaved or self._stopping)
                if not (self._slabs or self._unsaved):
                    return
                # The next turn of a chat needs the last rows in memory sooner than the first ones on disk.
                news = self._slabs.popleft() if self._slabs else None
                kept = self._unsaved.popleft() if news is None else None
                self._unsaved_nbytes -= kept.block.nbytes if kept is not None else 0
                self._working = True
            try:
                if news is not None:
                    self._assemble(*news)
                if kept is not None:
                    self.store.persist(kept)
            except Exception:  # outermost: one request's fault must not end the thread
                _log.exception("keeper_failed")
            with self._news:
                self._working = False
                self._news.notify_all()

    def _assemble(self, saving: Saving, slab: Slab | None) -> None:
        before = saving.pending_nbytes
        try:
            block = saving.advance(slab)
            if block is not None:
                self._keep(saving, block)
        except BlockInvalid as error:
            self._drop(saving, str(error))
        finally:
            with self._news:
                # What has become a block is the store's.
                self._pending_nbytes += saving.pending_nbytes - before - (slab.nbytes if slab is not None else 0)
                if slab is None:
                    self._ending.discard(saving)

    def _keep(self, saving: Saving, block: Block) -> None:
        kept = self.store.keep(block)
        if kept is None:
            self._drop(saving, "its parent is not held any more")
            return
        with self._news:
            fits = self._unsaved_nbytes + block.nbytes <= self._max_pending_nbytes
            if fits:
                self._unsaved.append(kept)
                self._unsaved_nbytes += block.nbytes
        if not fits:
            # It stays in memory as long as there is room; what continues it is not saved either.
            self.store.release(kept)
            self.undersaved += 1

    def _drop(self, saving: Saving, reason: str) -> None:
        saving.dropped = True
        self.dropped += 1
        _log.info("saving_dropped reason=%s", reason)
