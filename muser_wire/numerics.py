"""Numerics: the lanes, what a lane fixes, and the error budgets that tests and admission read.

A result is *exact* (equal bytes) or it has a budget here, with a reason. Nobody types a tolerance
anywhere else. The digest of a lane's rules is part of what two nodes must agree on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from muser_wire.errors import WireError
from muser_wire.identities import Digest, digest_of


class Lane(Enum):
    """One numerics path end to end. A handoff names its lane; nodes never mix lanes."""

    NATIVE = "native"


LANE_RULES = {
    Lane.NATIVE: {
        "version": 1,
        "keys": "after positions, rounded to the element type to nearest even, before attention reads them",
        "values": "rounded to the element type to nearest even, before attention reads them",
        "f16_range": "clamped to +-65504",
        "held_back": "the last prompt token",
    }
}
"""What the lane fixes. Changing a rule changes the digest, and nodes of two minds refuse each other."""


def numerics_digest(lane: Lane) -> Digest:
    """Return the identity of a lane's rules."""
    text = json.dumps({"lane": lane.value, **LANE_RULES[lane]}, sort_keys=True, separators=(",", ":"))
    return digest_of(b"muser numerics 1", text.encode())


@dataclass(frozen=True)
class Budget:
    """The largest absolute error that a result may have, and why that much."""

    max_abs: float
    reason: str


BUDGETS: dict[str, Budget] = {
    "attention_f32": Budget(2e-6, "f32 sums in another order, outputs of unit scale"),
    "attention_bf16": Budget(2e-2, "scores and weights rounded to 8 bits, outputs of unit scale"),
    "linear_f32": Budget(2e-6, "f32 sums in another order, outputs of unit scale"),
    "linear_bf16": Budget(2e-2, "products rounded to 8 bits, outputs of unit scale"),
    "planes_f32": Budget(2e-5, "f32 against float64, planes of unit scale, tiny models"),
    "planes_f16_kv": Budget(2e-3, "one rounding to 11 bits of planes of unit scale"),
    "planes_bf16": Budget(0.15, "bf16 compute through all layers of a tiny model"),
    "logits_f32": Budget(5e-4, "f32 against float64, logits of unit scale"),
    "logits_f16_kv": Budget(2e-2, "keys and values rounded to 11 bits, logits of unit scale"),
    "logits_packed": Budget(5e-3, "the same weights, group sums in another order"),
    "verify_planes": Budget(5e-4, "two f32 implementations of a whole model, planes of unit scale"),
}


def budget(name: str) -> float:
    """Return the largest absolute error allowed for the named result.

    Raises:
        WireError: no budget has this name.
    """
    found = BUDGETS.get(name)
    if found is None:
        raise WireError(f"no budget is named {name!r}; known: {', '.join(sorted(BUDGETS))}")
    return found.max_abs
