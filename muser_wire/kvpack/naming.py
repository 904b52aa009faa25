"""Names of blocks: a chain of keyed digests over everything that the planes depend on.

A name says which model, weights, numerics, grid and tokens, all of them from position 0, a block was computed
from. The key belongs to the store, so a name tells nobody else whether a guessed prompt was asked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import fields

from muser_wire.identities import Digest, Identities, digest_of
from muser_wire.kvpack.block import ID_NBYTES

KEY_NBYTES = 32
NAME_NBYTES = 32
LABEL = b"muser block 1"


def random_key() -> bytes:
    """Return a fresh key, for a store whose names nobody else needs to find again."""
    return os.urandom(KEY_NBYTES)


def state_digest(identities: Identities, computed: str = "") -> Digest:
    """Return the identity of what all blocks of one chain share: model, tokenizer, layout, lane, weights, grid.

    `computed` says what else a node's own results depend on, such as its compute type.
    """
    parts = [
        value if isinstance(value, bytes) else str(value).encode()
        for value in (getattr(identities, field.name) for field in fields(Identities))
    ]
    return digest_of(b"muser kvpack state 1", *parts, computed.encode())


def seal_key(key: bytes) -> bytes:
    """Return the key under which a store's files are sealed, from the store's own."""
    return hashlib.blake2b(b"files", key=key, digest_size=KEY_NBYTES, person=LABEL).digest()


class Namer:
    """Names the blocks of one model's state under one store's key; see `state_digest`."""

    def __init__(self, key: bytes, identities: Identities, computed: str = "") -> None:
        if len(key) != KEY_NBYTES:
            raise ValueError(f"a store's key has {KEY_NBYTES} bytes, not {len(key)}")
        self._key = key
        self.seal_key = seal_key(key)
        self.chunk_tokens = identities.chunk_tokens
        self.state = state_digest(identities, computed)
        self.root = self._digest(self.state)
        """The parent of every block at position 0."""

    def name(self, parent: Digest, start: int, ids: bytes) -> Digest:
        """Return the name of the block that continues `parent` at `start` with these packed ids."""
        return self._digest(parent + start.to_bytes(8, "little") + ids)

    def chain(self, ids: bytes) -> Iterator[tuple[Digest, Digest, int, bytes]]:
        """Yield (name, parent, start, own ids) for each block of a prompt; the last one may be a tail."""
        parent, step = self.root, self.chunk_tokens * ID_NBYTES
        for at in range(0, len(ids), step):
            own = ids[at : at + step]
            name = self.name(parent, at // ID_NBYTES, own)
            yield name, parent, at // ID_NBYTES, own
            parent = name

    def _digest(self, data: bytes) -> Digest:
        return Digest(hashlib.blake2b(data, key=self._key, digest_size=NAME_NBYTES, person=LABEL).digest())
