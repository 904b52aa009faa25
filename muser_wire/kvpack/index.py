"""The index: which blocks are held, as a tree, and the longest held prefix of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, BlockHead, resumes_inside
from muser_wire.kvpack.naming import Namer

MIN_HELD_TOKENS = 32
"""A shorter held prefix is not worth installing: computing so few tokens costs about as much."""


@dataclass(frozen=True)
class Held:
    """A block of a held prefix, of which tokens up to `stop` are of use."""

    head: BlockHead
    stop: int


@dataclass(frozen=True)
class Match:
    """The longest held prefix of a prompt: a chain of blocks from position 0.

    `reason` says why it ends where it does, in a few words. `decoded`: decode produced part of it.
    """

    blocks: tuple[Held, ...]
    reason: str

    @property
    def tokens(self) -> int:
        """How many leading tokens are held."""
        return self.blocks[-1].stop if self.blocks else 0

    @property
    def decoded(self) -> bool:
        """Whether decode produced part of what is held."""
        return any(held.stop > held.head.prefilled_stop for held in self.blocks)


class Index:
    """Heads of blocks by name and by parent. Its owner's lock guards it."""

    def __init__(self, namer: Namer, geometry: Geometry, *, reuse_decoded: bool) -> None:
        self._namer = namer
        self._geometry = geometry
        self._reuse_decoded = reuse_decoded
        self._heads: dict[Digest, BlockHead] = {}
        self._children: dict[Digest, set[Digest]] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def get(self, name: Digest) -> BlockHead | None:
        """Return a held block's head, or None."""
        return self._heads.get(name)

    def rooted(self, parent: Digest) -> bool:
        """Say whether a block may continue `parent`: it is held, or the beginning."""
        return parent == self._namer.root or parent in self._heads

    def add(self, head: BlockHead) -> None:
        """Take a block in."""
        self._heads[head.name] = head
        self._children.setdefault(head.parent, set()).add(head.name)

    def discard(self, name: Digest) -> None:
        """Forget a block; harmless when it is not held."""
        head = self._heads.pop(name, None)
        if head is not None:
            siblings = self._children[head.parent]
            siblings.discard(name)
            if not siblings:
                del self._children[head.parent]

    def ancestry(self, head: BlockHead) -> list[Digest]:
        """Return the names of the held blocks that lead to a block, itself first."""
        names = [head.name]
        parent = self._heads.get(head.parent)
        while parent is not None:
            names.append(parent.name)
            parent = self._heads.get(parent.parent)
        return names

    def superseded(self, head: BlockHead) -> list[Digest]:
        """Return the shorter siblings that a block holds whole, if one can go on inside it as well as at its end."""
        if not resumes_inside(self._geometry, head.start, head.stop):
            return []
        return [
            sibling.name
            for sibling in self._siblings(head.parent)
            if sibling.tokens < head.tokens
            and head.ids.startswith(sibling.ids)
            and sibling.prefilled_stop <= head.prefilled_stop
        ]

    def children(self, parent: Digest) -> list[BlockHead]:
        """Return the heads of the held blocks that continue a block."""
        return list(self._siblings(parent))

    def has_children(self, parent: Digest) -> bool:
        """Say whether any held block continues a block."""
        return parent in self._children

    def match(self, ids: bytes) -> Match:
        """Return the longest held prefix of packed token ids."""
        chain, parent, reason = self._whole_blocks(ids)
        at = chain[-1].stop if chain else 0
        best = self._best_part(parent, ids[at * ID_NBYTES :])
        if best is not None:
            chain.append(best)
            reason = f"differs at token {best.stop}"
        if chain and chain[-1].stop * ID_NBYTES == len(ids):
            reason = "all held"
        match = Match(tuple(chain), reason)
        if match.tokens < MIN_HELD_TOKENS:
            short = f"only {match.tokens} tokens are held" if chain else reason
            return Match((), short)
        return match

    def _whole_blocks(self, ids: bytes) -> tuple[list[Held], Digest, str]:
        """Return the chain of whole chunks that are held, the last one's name, and why no further one is."""
        chain: list[Held] = []
        parent = self._namer.root
        for name, _, _, own in self._namer.chain(ids):
            if len(own) < self._namer.chunk_tokens * ID_NBYTES:
                return chain, parent, f"nothing held goes beyond token {len(chain) * self._namer.chunk_tokens}"
            head = self._heads.get(name)
            if head is None or self._usable_stop(head) < head.stop:
                return chain, parent, f"no block continues token {len(chain) * self._namer.chunk_tokens}"
            chain.append(Held(head, head.stop))
            parent = name
        return chain, parent, "all held"

    def _best_part(self, parent: Digest, rest: bytes) -> Held | None:
        """Return the child of `parent` of which most leading tokens are of use, if any are."""
        wanted = np.frombuffer(rest, dtype="<u4")
        best: Held | None = None
        for head in self._siblings(parent):
            tokens = min(common_tokens(head.token_ids, wanted), self._usable_stop(head) - head.start)
            if tokens < head.tokens and not resumes_inside(self._geometry, head.start, head.stop):
                continue
            if tokens and (best is None or head.start + tokens > best.stop):
                best = Held(head, head.start + tokens)
        return best

    def _siblings(self, parent: Digest) -> Iterator[BlockHead]:
        for name in self._children.get(parent, ()):
            yield self._heads[name]

    def _usable_stop(self, head: BlockHead) -> int:
        return head.stop if self._reuse_decoded else head.prefilled_stop


def common_tokens(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many leading token ids are equal.

    >>> common_tokens(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter
