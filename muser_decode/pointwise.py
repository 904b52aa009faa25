"""The decoder's elementwise groups, in two versions: one compiled kernel each on a GPU, few operations on a CPU.

On the CPU `mx.compile` would run a C++ compiler, which a user's machine need not have; there sigmoids and
tanh inside an activation are powers of two, a third of the time on Linux.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from muser_decode.errors import ModelNotSupported
from muser_decode.numerics import on_gpu, round_kv
from muser_wire.geometry import ElementType
from muser_wire.model.spec import Activation, ModelSpec

LOG2_E = math.log2(math.e)
# tanh's form of gelu: x * sigmoid(2 sqrt(2 / pi) (x + CUBIC x^3)).
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715

Binary = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Pointwise:
    """What one model needs of them, for this device.

    - `activated(gate, up)`: the MLP's activation of the gate, times up.
    - `gated(x, gate)`: x * sigmoid(gate).
    - `joined(k, v)`: keys above values, `[kv_heads, tokens, head_dim]` each, rounded to the KV element type.
    - `logits(x)`: scaled and capped, in float32.
    """

    activated: Binary
    gated: Binary
    joined: Binary
    logits: Callable[[mx.array], mx.array]


def pointwise(spec: ModelSpec, element: ElementType) -> Pointwise:
    """Return the groups of a model.

    Raises:
        ModelNotSupported: its activation is unknown.
    """
    gpu = on_gpu()
    known = ACTIVATIONS_GPU if gpu else ACTIVATIONS_CPU
    activated = known.get(spec.activation)
    if activated is None:
        raise ModelNotSupported(f"the activation {spec.activation} is not supported")

    def logits(x: mx.array) -> mx.array:
        return finished(x, spec.logit_scale, spec.logit_softcap)

    if not gpu:
        return Pointwise(activated, gated_cpu, lambda k, v: round_kv(mx.concatenate([k, v]), element), logits)
    select = mx.array([True, False]).reshape(2, 1, 1, 1)
    choose = mx.compile(lambda k, v, is_key: round_kv(mx.where(is_key, k[None], v[None]), element), shapeless=True)
    return Pointwise(
        activated=mx.compile(activated, shapeless=True),
        gated=mx.compile(gated, shapeless=True),
        # A concatenation is a copy for each part, beside the rounding; a choice is one kernel with it.
        joined=lambda k, v: choose(k, v, select).flatten(0, 1),
        logits=mx.compile(logits, shapeless=True),
    )


def gated(x: mx.array, gate: mx.array) -> mx.array:
    """Return x * sigmoid(gate)."""
    return x * mx.sigmoid(gate)


def gated_cpu(x: mx.array, gate: mx.array) -> mx.array:
    """Return x * sigmoid(gate) by a power of two."""
    return x / (1.0 + mx.power(2.0, gate * -LOG2_E))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up."""
    return gated(gate, gate) * up


def swiglu_cpu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up by a power of two."""
    return gated_cpu(gate, gate) * up


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return gelu(gate) * up, in tanh's form."""
    # In this order mlx fuses all of it; a chain that is two longer becomes two kernels.
    return gated(gate * up, _gelu_bend(gate))


def geglu_cpu(gate: mx.array, up: mx.array) -> mx.array:
    """Return gelu(gate) * up, in tanh's form, by a power of two."""
    return gated_cpu(gate, _gelu_bend(gate)) * up


def _gelu_bend(x: mx.array) -> mx.array:
    return (x * x * (GELU_SLOPE * GELU_CUBIC) + GELU_SLOPE) * x


ACTIVATIONS_GPU: dict[Activation, Binary] = {Activation.SILU: swiglu, Activation.GELU_TANH: geglu}
ACTIVATIONS_CPU: dict[Activation, Binary] = {Activation.SILU: swiglu_cpu, Activation.GELU_TANH: geglu_cpu}


def finished(x: mx.array, scale: float, cap: float | None) -> mx.array:
    """Return logits in float32: x * scale, or cap * tanh(x * scale / cap), both constants folded into one first."""
    x = x.astype(mx.float32)
    if cap is not None:
        return mx.tanh(x * (scale / cap)) * cap
    return x if scale == 1.0 else x * scale
