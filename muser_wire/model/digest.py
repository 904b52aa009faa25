"""The weights digest: the identity of what the weights mean, whatever container or encoding holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from muser_wire.identities import Digest
from muser_wire.model.checkpoint import Checkpoint, Weight

LABEL = b"muser weights 1"
# 16 MB in float32: large enough that calls cost nothing, small beside any model.
SLICE_COUNT = 1 << 22


def weights_digest(checkpoint: Checkpoint) -> Digest:
    """Return SHA-256 over name, shape and little-endian float32 values of every tensor, in canonical order.

    A slice of one tensor is in memory at a time. Each part is preceded by its length in 8 bytes,
    little-endian, so that no two models collide by joining.
    """
    h = hashlib.sha256()

    def add(part: bytes) -> None:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)

    add(LABEL)
    for name in checkpoint.names():
        weight = checkpoint.weight(name)
        add(name.encode())
        add(b"".join(size.to_bytes(8, "little") for size in weight.shape))
        h.update((4 * weight.count).to_bytes(8, "little"))
        for values in slices(weight):
            h.update(values.astype("<f4", copy=False).data)
    return Digest(h.digest())


def slices(weight: Weight) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the float32 values of a weight in row order, about `SLICE_COUNT` at a time."""
    rows = weight.shape[0]
    step = max(1, SLICE_COUNT * rows // weight.count)
    for start in range(0, rows, step):
        yield weight.f32(start, min(rows, start + step))
