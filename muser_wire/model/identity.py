"""A node's identities, computed from what it loaded [2.1]."""

from __future__ import annotations

from muser_wire.geometry import ElementType, kv_layout
from muser_wire.identities import Identities
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.tokenizer import Tokenizer
from muser_wire.numerics import Lane, numerics_digest


def node_identities(
    checkpoint: Checkpoint, tokenizer: Tokenizer, *, element: ElementType, lane: Lane, chunk_tokens: int
) -> Identities:
    """Return what this node is, as far as a handoff depends on it. Reads every weight once."""
    return Identities(
        spec_digest=checkpoint.spec.digest(),
        tokenizer_digest=tokenizer.digest(),
        kv_layout=kv_layout(element),
        lane=lane.value,
        numerics_digest=numerics_digest(lane),
        chunk_tokens=chunk_tokens,
        weights_digest=weights_digest(checkpoint),
    )
