"""Identities: things named by digest, and the comparison that refuses a difference by name.

Clauses cite docs/protocol.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import NewType

from muser_wire.errors import IdentityMismatch

Digest = NewType("Digest", bytes)
"""A SHA-256 digest: 32 bytes."""


def digest_of(label: bytes, *parts: bytes) -> Digest:
    """Return SHA-256 over `label` and `parts`, each preceded by its length, so that joined inputs never collide."""
    h = hashlib.sha256()
    for part in (label, *parts):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return Digest(h.digest())


@dataclass(frozen=True)
class Identities:
    """What a node is, as far as a handoff depends on it [2.1].

    `kv_layout` names element type, plane order and units of a segment; `chunk_tokens` is the grid.
    """

    spec_digest: Digest
    tokenizer_digest: Digest
    kv_layout: str
    lane: str
    numerics_digest: Digest
    chunk_tokens: int
    weights_digest: Digest


def compare(here: Identities, there: Identities, *, allow_unqualified: bool = False) -> None:
    """Check that two nodes may share one handoff [2.2].

    `allow_unqualified` is the operator's explicit word that the weights may differ; nothing else
    can be waived.

    Raises:
        IdentityMismatch: for the first field that differs, in the order of the dataclass.
    """
    for field in fields(Identities):
        if field.name == "weights_digest" and allow_unqualified:
            continue
        ours, theirs = getattr(here, field.name), getattr(there, field.name)
        if ours != theirs:
            raise IdentityMismatch(field.name, show(ours), show(theirs))


def show(value: object) -> str:
    """Return an identity as a person reads it: digests as their first 16 hex digits."""
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
