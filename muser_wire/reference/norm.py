"""RMSNorm [N5]: a sum of squares in 64 lanes, and a reciprocal of a square root in two correctly rounded steps."""

from __future__ import annotations

from muser_wire.model.spec import as_f32
from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import LANES


def lane_sum(ar: Arithmetic, x: Array) -> Array:
    """Return the sum along the last axis, which stays with size 1.

    The array is filled with +0 up to rows of 64; rows are added up ascending, beginning with +0; then the second half
    of the 64 sums is added to the first until one is left.
    """
    shape, size = tuple(x.shape)[:-1], x.shape[-1]
    rows = -(-size // LANES)
    if rows * LANES > size:
        x = ar.concatenate([x, ar.zeros((*shape, rows * LANES - size))], -1)
    total = ar.zeros((*shape, LANES))
    for row in range(rows):
        total = total + x[..., row * LANES : (row + 1) * LANES]
    width = LANES
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width:]
    return total


def rms_norm(ar: Arithmetic, x: Array, weight: Array | None, eps: float) -> Array:
    """Return (x * r) * weight over the last axis, r = 1 / sqrt(sum of squares * f32(1 / n) + eps).

    Without a weight it is x * r.
    """
    mean = lane_sum(ar, x * x) * as_f32(1.0 / x.shape[-1])
    r = ar.reciprocal(ar.sqrt(mean + eps))
    scaled = x * r
    return scaled if weight is None else scaled * weight
