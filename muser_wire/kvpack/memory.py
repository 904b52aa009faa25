"""Blocks in memory: bounded in bytes. What was used least recently leaves, of one chain the deepest first.

A use of a block is a use of its whole chain, so what many chats begin with outlives each chat's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muser_wire.identities import Digest
from muser_wire.kvpack.block import Block


@dataclass
class _Kept:
    block: Block
    used_ns: int

    @property
    def order(self) -> tuple[int, int]:
        return self.used_ns, -self.block.head.start


class MemoryTier:
    """Blocks by name. Its owner's lock guards it."""

    def __init__(self, bound_nbytes: int) -> None:
        self._most_nbytes = self._bound_nbytes = bound_nbytes
        self._kept: dict[Digest, _Kept] = {}
        self.nbytes = 0
        self.evicted = 0

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: Digest) -> Block | None:
        """Return a block, or None."""
        kept = self._kept.get(name)
        return kept.block if kept else None

    def put(self, block: Block, used_ns: int) -> list[Digest]:
        """Keep a block, unless blocks at least as new would have to leave for it; return the names of those that left.

        That is the block's own alone when it could not be kept: then nothing leaves in vain.
        """
        self.drop(block.head.name)
        victims = self._victims(block.nbytes, used_ns)
        if victims is None:
            return [block.head.name]
        for victim in victims:
            self.drop(victim)
        self.evicted += len(victims)
        self._kept[block.head.name] = _Kept(block, used_ns)
        self.nbytes += block.nbytes
        return victims

    def _victims(self, nbytes: int, used_ns: int) -> list[Digest] | None:
        """Return what must leave so that `nbytes` fit; None when only what is in use now could make room."""
        excess, victims = self.nbytes + nbytes - self._bound_nbytes, list[Digest]()
        for kept in sorted(self._kept.values(), key=lambda kept: kept.order) if excess > 0 else ():
            if excess <= 0 or kept.used_ns >= used_ns:
                break
            victims.append(kept.block.head.name)
            excess -= kept.block.nbytes
        return None if excess > 0 else victims

    def bound(self, nbytes: int) -> list[Digest]:
        """Keep at most so many bytes, and never more than at first; return the names of the blocks that left."""
        self._bound_nbytes = max(0, min(self._most_nbytes, nbytes))
        left: list[Digest] = []
        while self.nbytes > self._bound_nbytes:
            victim = min(self._kept.values(), key=lambda kept: kept.order).block.head.name
            self.drop(victim)
            self.evicted += 1
            left.append(victim)
        return left

    def drop(self, name: Digest) -> None:
        """Forget a block; harmless when it is not there."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.nbytes -= kept.block.nbytes

    def touch(self, names: Iterable[Digest], used_ns: int) -> None:
        """Note that blocks were used."""
        for name in names:
            if name in self._kept:
                self._kept[name].used_ns = used_ns
