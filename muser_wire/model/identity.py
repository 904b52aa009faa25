"""A node's identities, computed from what it loaded [2.1]."""

from __future__ import annotations

from muser_wire.geometry import ElementType, kv_layout
from muser_wire.identities import Digest, Identities
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.tokenizer import Tokenizer
from muser_wire.numerics import Lane, check_element, numerics_digest
from muser_wire.reference.canonical import CanonicalWeights


def node_identities(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    element: ElementType,
    lane: Lane,
    chunk_tokens: int,
    conformance: Digest | None = None,
) -> Identities:
    """Return what this node is, as far as a handoff depends on it. Reads every weight once.

    The reference lane needs `conformance`, and its weights digest is over their canonical form.

    Raises:
        NumericsMismatch: the lane cannot store planes as `element`, or has no digest for its conformance.
        CheckpointError: the weights have no form that the reference lane computes with.
    """
    check_element(lane, element)
    weights = weights_digest(checkpoint) if lane is Lane.NATIVE else CanonicalWeights(checkpoint).digest()
    return Identities(
        spec_digest=checkpoint.spec.digest(),
        tokenizer_digest=tokenizer.digest(),
        kv_layout=kv_layout(element),
        lane=lane.value,
        numerics_digest=numerics_digest(lane, conformance),
        chunk_tokens=chunk_tokens,
        weights_digest=weights,
    )
