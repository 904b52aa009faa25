"""2 ** x, and the functions made of it [N6]."""

from __future__ import annotations

from muser_wire.model.spec import Activation, as_f32
from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.constants import EXP2_COEFFICIENTS, EXP2_LIMIT, GELU_CUBIC, GELU_LINEAR, LOG2_E


def exp2(ar: Arithmetic, x: Array) -> Array:
    """Return 2 ** x of x clamped to +-120, within 3e-6 of its value."""
    y = ar.minimum(ar.maximum(x, -EXP2_LIMIT), EXP2_LIMIT)
    n = ar.rint(y)
    r = y - n
    p = r * EXP2_COEFFICIENTS[0]
    for coefficient in EXP2_COEFFICIENTS[1:-1]:
        p = p + coefficient
        p = p * r
    p = p + EXP2_COEFFICIENTS[-1]
    return ar.from_bits(ar.bits(p) + (ar.to_int32(n) << 23))


def sigmoid(ar: Arithmetic, x: Array) -> Array:
    """Return 1 / (1 + exp(-x)): the reciprocal of 2 ** (x * -log2 e) + 1."""
    return ar.reciprocal(exp2(ar, x * -LOG2_E) + 1.0)


def tanh(ar: Arithmetic, x: Array) -> Array:
    """Return tanh x: sigmoid(x * 2) * 2 - 1."""
    return sigmoid(ar, x * 2.0) * 2.0 - 1.0


def activated(ar: Arithmetic, gate: Array, up: Array, activation: Activation) -> Array:
    """Return (gate * sigmoid(v)) * up: v is the gate for silu; for gelu in its tanh form x * (a + b * (x * x))."""
    v = gate
    if activation is Activation.GELU_TANH:
        cubic = gate * gate
        cubic = cubic * GELU_CUBIC
        cubic = cubic + GELU_LINEAR
        v = gate * cubic
    return (gate * sigmoid(ar, v)) * up


def softcapped(ar: Arithmetic, logits: Array, cap: float) -> Array:
    """Return tanh(logits * f32(1 / cap)) * cap."""
    return tanh(ar, logits * as_f32(1.0 / cap)) * cap
