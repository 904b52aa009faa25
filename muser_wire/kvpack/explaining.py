"""Why a prompt is held as far as it is: block by block, where it lies or why it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES
from muser_wire.kvpack.departed import Departures
from muser_wire.kvpack.index import Index, common_tokens
from muser_wire.kvpack.naming import Namer


@dataclass(frozen=True)
class BlockAccount:
    """Tokens [start, stop) of a prompt, as far as one block can hold them.

    `held` leading ones are of use, from the tier that `where` names; `decoded`: decode produced some of them.
    `reason` says why there are no more, and is empty where all are held.
    """

    start: int
    stop: int
    held: int
    where: str
    decoded: bool
    reason: str


class Explainer:
    """Explains prompts over an index. `where` says in which tier a held block lies."""

    def __init__(self, namer: Namer, index: Index, departures: Departures, where: Callable[[Digest], str]) -> None:
        self._namer, self._index, self._departures, self._where = namer, index, departures, where

    def accounts(self, ids: bytes) -> list[BlockAccount]:
        """Return what is held of packed token ids, in order; every token is in one of the accounts."""
        match = self._index.match(ids)
        held = {part.head.start: part for part in match.blocks}
        accounts = []
        for name, parent, start, own in self._namer.chain(ids):
            stop, part = start + len(own) // ID_NBYTES, held.get(start)
            if part is None:
                reason = self._why_not(name, parent, start, own) if start == match.tokens else self._why_no_more(name)
                # Something else than the missing of blocks kept a held prefix from use.
                short = match.reason if not match.blocks and match.reason.startswith("only") and not start else reason
                accounts.append(BlockAccount(start, stop, 0, "", False, short))
                continue
            decoded = part.stop > part.head.prefilled_stop
            reason = "" if part.stop == stop else self._why_ends(part.head.stop, part.stop, name, start, own)
            where = self._where(part.head.name)
            accounts.append(BlockAccount(start, stop, part.stop - start, where, decoded, reason))
        return accounts

    def _why_ends(self, block_stop: int, held_stop: int, name: Digest, start: int, own: bytes) -> str:
        gone = self._departures.why(name)
        if gone is not None:
            return f"a block that held more {gone.value}"
        if self._index.get(name) is not None:
            return "decode produced the rest, which the policy leaves alone"
        if held_stop < block_stop:
            return f"differs at token {held_stop}"
        return f"nothing held goes beyond token {held_stop}"

    def _why_not(self, name: Digest, parent: Digest, start: int, own: bytes) -> str:
        """Return why a block whose parent is held, or that is the first, is not."""
        if self._index.get(name) is not None:
            return "decode produced it, which the policy leaves alone"
        gone = self._departures.why(name)
        if gone is not None:
            return gone.value
        wanted = np.frombuffer(own, dtype="<u4")
        common = max((common_tokens(head.token_ids, wanted) for head in self._index.children(parent)), default=0)
        if common:
            return f"differs at token {start + common}, inside a block whose windows allow to go on at its end only"
        after = self._departures.after(parent)
        if after is not None:
            return f"never seen; another block after token {start} {after.value}"
        return f"differs at token {start}" if self._index.has_children(parent) else "never seen"

    def _why_no_more(self, name: Digest) -> str:
        gone = self._departures.why(name)
        if gone is not None:
            return gone.value
        return (
            "held, but the one before it is not"
            if self._index.get(name) is not None
            else "the one before it is not held"
        )
