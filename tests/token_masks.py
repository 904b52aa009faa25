"""What a constraint's mask says."""

from __future__ import annotations

import numpy as np

from muser_decode.engine.request import TokenConstraint


def allowed(constraint: TokenConstraint) -> list[int]:
    """The ids of the tokens that may come next."""
    mask = constraint.mask()
    assert mask is not None
    return [int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]
