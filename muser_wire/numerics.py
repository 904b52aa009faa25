"""Numerics: the lanes, what a lane fixes, and the error budgets that tests and admission read.

A result is *exact* (equal bytes) or it has a budget here, with a reason. Nobody types a tolerance
anywhere else. The digest of a lane's rules is part of what two nodes must agree on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from muser_wire.errors import NumericsMismatch, WireError
from muser_wire.geometry import ElementType
from muser_wire.identities import Digest, digest_of
from muser_wire.reference.constants import RULES_VERSION
from muser_wire.reference.constants import table as reference_table


class Lane(Enum):
    """One numerics path end to end. A handoff names its lane; nodes never mix lanes."""

    NATIVE = "native"
    REFERENCE = "reference"


LANE_RULES: dict[Lane, dict[str, Any]] = {
    Lane.NATIVE: {
        "version": 1,
        "keys": "after positions, rounded to the element type to nearest even, before attention reads them",
        "values": "rounded to the element type to nearest even, before attention reads them",
        "f16_range": "clamped to +-65504",
        "held_back": "the last prompt token",
    },
    Lane.REFERENCE: {
        "version": RULES_VERSION,
        "constants": reference_table(),
        "quantise": "groups scaled by powers of two, rounded half to even",
        "linear": "exact integer dots a group; s * D, then + m * S; groups ascending from +0",
        "norm": "sum of squares in 64 lanes, rows ascending from +0, lanes by halving; times f32(1 / n), plus eps; "
        "1 / sqrt in two roundings; (x * r) * w",
        "positions": "decimal frequencies, angles in 64-bit turns, polynomials in float64, rounded to float32",
        "exp2": "n = rint, Horner in steps, exponent by integers; sigmoid, tanh, silu, gelu made of it",
        "planes": "f16, magnitudes under 2^-14 are +0, clamped to +-65504",
        "attention": "head groups ascending; blocks of 64 keys anchored at 0, maxima raised to the next integer",
        "held_back": "the last prompt token",
    },
}
"""What the lane fixes. Changing a rule changes the digest, and nodes of two minds refuse each other."""


def numerics_digest(lane: Lane, conformance: Digest | None = None) -> Digest:
    """Return the identity of a lane: of its rules and, in the reference lane, of how this node's device follows them.

    `conformance` is what `muser_wire.reference.conformance` found; the native lane has none.

    Raises:
        NumericsMismatch: the reference lane without `conformance`, or the native lane with it.
    """
    if (lane is Lane.REFERENCE) != (conformance is not None):
        raise NumericsMismatch(f"the {lane.value} lane {'has no' if conformance else 'needs a'} conformance digest")
    text = json.dumps({"lane": lane.value, **LANE_RULES[lane]}, sort_keys=True, separators=(",", ":"))
    return digest_of(b"muser numerics 1", text.encode(), *([] if conformance is None else [conformance]))


def rules_digest(lane: Lane) -> Digest:
    """Return the identity of a lane's rules alone, as docs/numerics.md shows it."""
    text = json.dumps(LANE_RULES[lane], sort_keys=True, separators=(",", ":"))
    return digest_of(b"muser rules 1", text.encode())


def speculation_allowed(lane: Lane) -> None:
    """Refuse a drafter: at construction, in the server as in a qualifier.

    In the native lane a batch of several tokens rounds otherwise than one token at a time, so a drafter would change
    the text. In the reference lane it could not, but this version has no drafter.

    Raises:
        NumericsMismatch: always, with the reason.
    """
    if lane is Lane.NATIVE:
        raise NumericsMismatch(
            "a drafter is refused in the native lane: checking several tokens at once rounds otherwise than one at a "
            "time, so it would change answers"
        )
    raise NumericsMismatch(f"a drafter is allowed in the {lane.value} lane, but speculation is not built yet")


def check_element(lane: Lane, element: ElementType) -> None:
    """Check that a lane can store planes as `element`.

    Raises:
        NumericsMismatch: the reference lane's planes are f16.
    """
    if lane is Lane.REFERENCE and element is not ElementType.F16:
        raise NumericsMismatch(f"the reference lane stores keys and values as f16, not {element.value}")


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
    "reference_planes": Budget(0.02, "integers of 12 bits and one rounding to 11, planes of unit scale, tiny models"),
    "reference_logits": Budget(0.02, "integers of 12 bits through all layers, logits of unit scale, tiny models"),
    "reference_kl": Budget(1e-4, "mean divergence of the reference lane from f32 with the same weights, in nats"),
    "reference_top1": Budget(5e-3, "share of tokens whose best next token differs from that of f32"),
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
