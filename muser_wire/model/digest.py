"""The weights digest: the identity of what the weights mean, whatever container or encoding holds them."""

from __future__ import annotations

import hashlib

from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint

LABEL = b"muser weights 1"


def weights_digest(checkpoint: Checkpoint) -> Digest:
    """Return SHA-256 over name, shape and little-endian float32 values of every tensor, in canonical order.

    One tensor is in memory at a time. Each part is preceded by its length in 8 bytes, little-endian,
    so that no two models collide by joining.
    """
    h = hashlib.sha256()

    def add(part: bytes | memoryview) -> None:
        h.update(memoryview(part).nbytes.to_bytes(8, "little"))
        h.update(part)

    add(LABEL)
    for name in checkpoint.names():
        weight = checkpoint.weight(name)
        add(name.encode())
        add(b"".join(size.to_bytes(8, "little") for size in weight.shape))
        add(weight.f32().astype("<f4", copy=False).data)
    return Digest(h.digest())
