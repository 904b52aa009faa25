"""The store: blocks in memory first, on disk below it, and the longest held prefix of a prompt.

A block that fails any check is a miss: it is deleted and counted, never served and never an error to a user.
Blocks are immutable, so whoever got one keeps it whatever the store does next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import Block, BlockHead
from muser_wire.kvpack.departed import Departure, Departures
from muser_wire.kvpack.disk import DiskTier
from muser_wire.kvpack.explaining import BlockAccount, Explainer
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.index import Index, Match
from muser_wire.kvpack.memory import MemoryTier
from muser_wire.kvpack.naming import Namer


class Tier(Enum):
    """Where a block came from."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True)
class Fetched:
    """A block and where it was."""

    block: Block
    tier: Tier


@dataclass(frozen=True)
class Kept:
    """A block on its way into the store: its held ancestors, itself first, and what it takes the place of."""

    block: Block
    lineage: tuple[Digest, ...]
    superseded: tuple[Digest, ...]
    used_ns: int
    present: bool = False


@dataclass
class _Counts:
    prompts: int = 0
    hits: int = 0
    held_tokens: int = 0
    prompt_tokens: int = 0
    fetched_memory: int = 0
    fetched_disk: int = 0
    lost: int = 0
    orphans: int = 0


class BlockStore:
    """The blocks of one model's state. Every method is thread-safe.

    `disk` has been scanned, and its heads are `found`. `reuse_decoded` False leaves alone what decode produced.
    """

    def __init__(
        self,
        namer: Namer,
        geometry: Geometry,
        memory_nbytes: int,
        disk: DiskTier | None = None,
        *,
        reuse_decoded: bool = True,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.namer = namer
        self.geometry = geometry
        self._memory = MemoryTier(memory_nbytes)
        self._disk = disk
        self._index = Index(namer, geometry, reuse_decoded=reuse_decoded)
        self._on_disk: set[Digest] = set()
        self._unsaved: dict[Digest, Block] = {}
        self._departures = disk.departures if disk is not None else Departures()
        self._lock = threading.Lock()
        self._clock_ns = clock_ns
        self._counts = _Counts()
        for head in disk.scan() if disk else ():
            self._index.add(head)
            self._on_disk.add(head.name)
        # A clock that was set back must not make everything new the oldest.
        self._now_ns = disk.newest_ns if disk else 0

    @property
    def files(self) -> Files | None:
        """Where the disk's blocks lie, if there is a disk."""
        return self._disk.files if self._disk is not None else None

    def match(self, ids: bytes) -> Match:
        """Return the longest held prefix of packed token ids, and count it as used. Reads no file."""
        with self._lock:
            match = self._index.match(ids)
            counts = self._counts
            counts.prompts += 1
            counts.prompt_tokens += len(ids) // 4
            counts.hits += bool(match.blocks)
            counts.held_tokens += match.tokens
            used = [held.head.name for held in match.blocks]
            now_ns = self._tick()
            self._memory.touch(used, now_ns)
        if self._disk is not None:
            self._disk.touch(used, now_ns)
        return match

    def explain(self, ids: bytes) -> Match:
        """Return what `match` would, without counting it."""
        with self._lock:
            return self._index.match(ids)

    def accounts(self, ids: bytes) -> list[BlockAccount]:
        """Return where each block of a prompt lies, or why it does not; nothing is counted."""
        with self._lock:
            return Explainer(self.namer, self._index, self._departures, self._where).accounts(ids)

    def fetch(self, head: BlockHead) -> Fetched | None:
        """Return a block of a match, from memory or else verified from disk; None when it has gone meanwhile."""
        with self._lock:
            block = self._memory.get(head.name) or self._unsaved.get(head.name)
            if block is not None:
                self._counts.fetched_memory += 1
                return Fetched(block, Tier.MEMORY)
        block = self._disk.load(head) if self._disk is not None and head.name in self._on_disk else None
        with self._lock:
            if block is None:
                self._counts.lost += 1
                self._gone_from_disk(head.name, Departure.DAMAGED)
                return None
            self._counts.fetched_disk += 1
            # Promoting it is a use of its ancestors too; otherwise a later block could push them out before it.
            now_ns = self._tick()
            self._memory.touch(self._index.ancestry(head), now_ns)
            self._keep_in_memory(block, now_ns)
            return Fetched(block, Tier.DISK)

    def put(self, block: Block) -> bool:
        """Keep a block whose parent is held; return whether it now is, in memory or on disk. Waits for the disk."""
        kept = self.keep(block)
        return kept is not None and self.persist(kept)

    def keep(self, block: Block) -> Kept | None:
        """Keep a block in memory, as far as it fits; None when its parent is not held. `persist` must follow."""
        head = block.head
        with self._lock:
            if not self._index.rooted(head.parent):
                self._counts.orphans += 1
                return None
            present = self._index.get(head.name)
            if present is not None and present.prefilled_stop >= head.prefilled_stop:
                return Kept(block, (), (), self._now_ns, present=True)
            lineage, now_ns = tuple(self._index.ancestry(head)), self._tick()
            self._memory.touch(lineage, now_ns)
            self._index.add(head)
            if self._disk is not None:
                # Until it is there, or never will be, blocks that continue it must find it.
                self._unsaved[head.name] = block
            self._keep_in_memory(block, now_ns)
            return Kept(block, lineage, tuple(self._index.superseded(head)), now_ns)

    def persist(self, kept: Kept) -> bool:
        """Save on disk what `keep` returned, where there is one; return whether the block is held now."""
        if kept.present:
            return True
        self._save(kept)
        held = self._settled(kept)
        if held:
            self._supersede(kept)
        return held

    def release(self, kept: Kept) -> None:
        """Say that `persist` will not follow."""
        if not kept.present:
            self._settled(kept)

    def bound_memory(self, nbytes: int) -> None:
        """Keep at most so many bytes in memory from now on, as far as configured; others need the rest."""
        with self._lock:
            for name in self._memory.bound(nbytes):
                self._gone_from_memory(name)

    def stats(self) -> dict[str, object]:
        """Return counts and sizes, as plain values with units in their names."""
        with self._lock:
            disk = self._disk
            return {
                "blocks": len(self._index),
                "memory_blocks": len(self._memory),
                "memory_nbytes": self._memory.nbytes,
                "memory_evicted": self._memory.evicted,
                **asdict(self._counts),
                **({f"disk_{name}": value for name, value in asdict(disk.counts).items()} if disk else {}),
                **({"disk_nbytes": disk.nbytes} if disk else {}),
            }

    def _tick(self) -> int:
        self._now_ns = max(self._now_ns + 1, self._clock_ns())
        return self._now_ns

    def _keep_in_memory(self, block: Block, now_ns: int) -> None:
        for name in self._memory.put(block, now_ns):
            self._gone_from_memory(name)

    def _settled(self, kept: Kept) -> bool:
        """Stop waiting for a block to be saved; return whether it is held in memory or on disk."""
        name = kept.block.head.name
        with self._lock:
            if self._unsaved.get(name) is kept.block:
                del self._unsaved[name]
            if name in self._memory or name in self._on_disk:
                return True
            self._forget(name, Departure.UNSAVED)
            return False

    def _save(self, kept: Kept) -> None:
        """Save a block, and before it what it continues, as far as an earlier failure left that in memory alone."""
        if self._disk is None:
            return
        self._disk.touch(kept.lineage, kept.used_ns)
        for name in reversed(kept.lineage[1:]):
            with self._lock:
                saved, block = name in self._on_disk, self._memory.get(name)
            if not saved and (block is None or not self._save_one(self._disk, block, kept.used_ns)):
                # After a restart nothing would lead to it.
                return
        self._save_one(self._disk, kept.block, kept.used_ns)

    def _save_one(self, disk: DiskTier, block: Block, used_ns: int) -> bool:
        head, saved = block.head, disk.save(block, used_ns)
        with self._lock:
            for name in saved.evicted:
                self._gone_from_disk(name, Departure.EVICTED)
            if saved.done:
                self._on_disk.add(head.name)
                if self._index.rooted(head.parent):
                    self._index.add(head)
        return saved.done

    def _gone_from_disk(self, name: Digest, reason: Departure) -> None:
        self._on_disk.discard(name)
        if name not in self._memory and name not in self._unsaved:
            self._forget(name, reason)

    def _gone_from_memory(self, name: Digest) -> None:
        if name not in self._on_disk and name not in self._unsaved:
            self._forget(name, Departure.EVICTED)

    def _forget(self, name: Digest, reason: Departure) -> None:
        head = self._index.get(name)
        if head is not None:
            self._departures.note(name, head.parent, reason)
            self._index.discard(name)

    def _where(self, name: Digest) -> str:
        tier = Tier.MEMORY if name in self._memory or name in self._unsaved else Tier.DISK
        return str(tier.value)

    def _supersede(self, kept: Kept) -> None:
        """Drop what a block holds whole: from memory, and from disk once the block itself is there."""
        with self._lock:
            stored = [name for name in kept.superseded if name in self._on_disk]
            staying = stored if kept.block.head.name not in self._on_disk else []
            for name in kept.superseded:
                self._memory.drop(name)
                if name not in staying:
                    self._on_disk.discard(name)
                    self._index.discard(name)
        for name in stored:
            if self._disk is not None and name not in staying:
                self._disk.drop(name)
