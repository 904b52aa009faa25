"""What a model costs, from its description alone: weights, arithmetic, bytes of KV, time to the first token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.families.tensors import layer_shapes
from muser_wire.model.spec import ModelSpec
from muser_wire.schedule import Schedule, ScheduleRequest, WindowPolicy, build_schedule


def active_weights(spec: ModelSpec) -> int:
    """Return how many weights of matrices one token is multiplied with: every layer's, and the head.

    An embedding gives one row and norms are vectors: neither is counted.
    """
    layer = sum(math.prod(shape) for shape in layer_shapes(spec).values() if len(shape) == 2)
    return layer * len(spec.layers) + spec.vocab_size * spec.hidden_size


def token_flops(spec: ModelSpec) -> int:
    """Return the arithmetic of one decoded token, in FLOP: a product and a sum for each weight.

    Attention's own products come on top and grow with the context: over 2,048 tokens a layer of Muse
    Glimmer needs 3.5 % more.
    """
    return 2 * active_weights(spec)


def full_layer_token_nbytes(spec: ModelSpec, element: ElementType) -> int:
    """Return the bytes of KV that one token leaves in the layers that see everything."""
    full = sum(layer.window is None for layer in spec.layers)
    return full * Geometry.of(spec, element).layer_token_nbytes


def windows_nbytes(spec: ModelSpec, element: ElementType) -> int:
    """Return the bytes of KV of all sliding layers with full windows: their most, whatever the context."""
    tokens = sum(layer.window for layer in spec.layers if layer.window is not None)
    return tokens * Geometry.of(spec, element).layer_token_nbytes


def plan_schedule(spec: ModelSpec, request: PlanRequest) -> Schedule:
    """Return the schedule of the handoff that the plan is about."""
    return build_schedule(
        ScheduleRequest(
            geometry=Geometry.of(spec, request.element),
            prompt_tokens=request.prompt_tokens,
            held_tokens=request.held_tokens,
            chunk_tokens=request.chunk_tokens,
            policy=request.policy,
        )
    )


@dataclass(frozen=True)
class PlanRequest:
    """A prompt, as a handoff would see it. The last token is the decode node's and never prefilled."""

    prompt_tokens: int
    held_tokens: int
    chunk_tokens: int
    policy: WindowPolicy
    element: ElementType


def remote_s(spec: ModelSpec, schedule: Schedule, prefill_rate: float, link_rate: float) -> float:
    """Return the seconds until the last byte of a remote prefill has arrived.

    `prefill_rate` is in tokens a second, `link_rate` in bytes a second. A chunk's time is spread evenly
    over its layers. A segment leaves when its last layer is computed and the link is free, so all but
    the last few travel while later ones are computed.
    """
    computed = arrived = 0.0
    for chunk in schedule.chunks:
        chunk_s = (chunk.stop - chunk.start) / prefill_rate
        for segment in chunk.segments:
            ready = computed + chunk_s * (segment.last_layer + 1) / len(spec.layers)
            arrived = max(arrived, ready) + segment.nbytes / link_rate
        computed += chunk_s
    return max(computed, arrived)


def local_s(schedule: Schedule, prefill_rate: float) -> float:
    """Return the seconds of a prefill by the decode node itself, of the same tokens."""
    return (schedule.chunks[-1].stop - schedule.chunks[0].start) / prefill_rate
