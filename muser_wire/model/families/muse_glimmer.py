"""The text decoder of Muse Glimmer: three sliding layers with rotary positions to each full one without any.

Queries and keys are normalised without a weight and queries multiplied by a constant, attention
passes a gate, logits a soft cap. A multimodal checkpoint nests the decoder; vision and drafter stay aside.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families.description import Aside, Family, TensorEntry
from muser_wire.model.families.reading import (
    MAX_LAYERS,
    ConfigNames,
    config_base,
    config_rope,
    gguf_base,
    gguf_pattern,
    gguf_rope,
    layer_kinds,
    text_fields,
)
from muser_wire.model.families.tensors import (
    FOLDER_PARTS,
    FOLDER_POST_NORMS,
    GGUF_PARTS,
    GGUF_POST_NORMS,
    folder_names,
    gguf_names,
    nested_names,
    tensor_entries,
)
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LayerSpec, ModelSpec, QKNorm, RopeSpec, as_f32

NAME = "muse_glimmer"
GGUF_NAME = "muse-glimmer"
PERIOD = 4
# Constants of the family that a GGUF file need not or cannot hold.
POST_NORM_EPS = 1e-8
LOGIT_SOFTCAP = 20.0

GGUF_EXTRAS = frozenset(
    {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "logit_scale",
        "rope.freq_base_swa",
    }
)
DEFAULTS = {
    "final_logit_softcapping": LOGIT_SOFTCAP,
    "head_dim": 128,
    "hidden_activation": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": POST_NORM_EPS,
    "qk_scale_factor": 3.87,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "vocab_size": 202_048,
}
# The names of its own drafter, should one lie beside it.
DRAFTER = r"(encoder\.(fc|output_norm_enc)|layers\.\d+\..*|norm)\.weight"

_GATE_GGUF, _GATE_FOLDER = {"attn.gate": "attn_gate"}, {"attn.gate": "self_attn.gate_proj"}
_GGUF = gguf_names({**GGUF_PARTS, **GGUF_POST_NORMS, **_GATE_GGUF}, interleaved=True)
_FOLDER = folder_names(
    {**FOLDER_PARTS, **FOLDER_POST_NORMS, **_GATE_FOLDER},
    centred=("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"),
)


def entries(spec: ModelSpec, container: Container) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order. A GGUF file holds 1 + w where a folder holds w."""
    return tensor_entries(spec, _GGUF if container.kind is ContainerKind.GGUF else nested_names(_FOLDER, container))


def spec(container: Container) -> ModelSpec:
    """Return the spec of a Muse Glimmer checkpoint.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    base = _from_gguf(container) if container.kind is ContainerKind.GGUF else _from_config(container.fields)
    return replace(base, qk_norm=QKNorm(weighted=False, eps=base.norm_eps), attention_gate=True, embedding_norm=True)


def _from_gguf(container: Container) -> ModelSpec:
    fields = container.fields
    base = gguf_base(container, NAME, also=GGUF_EXTRAS)
    count = len(base.layers)
    _require_whole_periods(fields, count)
    window = fields.integer(f"{GGUF_NAME}.attention.sliding_window")
    swa = "rope.freq_base_swa"
    rope = gguf_rope(fields, base.head_dim, base=swa if fields.has(f"{GGUF_NAME}.{swa}") else "rope.freq_base")
    kinds = gguf_pattern(fields, count, default_period=PERIOD)
    return replace(
        base,
        layers=tuple(LayerSpec(window, rope) if slides else LayerSpec(None, None) for slides in kinds),
        attention_scale=_attention_scale(_query_factor(container, count), base.head_dim),
        post_norm_eps=as_f32(POST_NORM_EPS),
        logit_scale=as_f32(fields.number(f"{GGUF_NAME}.logit_scale")),
        logit_softcap=as_f32(fields.number(f"{GGUF_NAME}.final_logit_softcapping", default=LOGIT_SOFTCAP)),
    )


def _require_whole_periods(fields: Fields, count: int) -> None:
    """Refuse a period that does not divide the layers: readers disagree on the end from which it counts."""
    name = f"{GGUF_NAME}.attention.sliding_window_pattern"
    period = PERIOD if fields.get(name) is None else fields.get(name)
    if not isinstance(period, list) and count % fields.integer(name, at_most=MAX_LAYERS, default=PERIOD):
        raise fields.refusal(name, f"is {period}, which does not divide {count} layers; only an array would be clear")


def _query_factor(container: Container, count: int) -> float:
    """Return the constant by which queries are multiplied.

    A GGUF file spells it as norm weights: everywhere this constant for queries, everywhere 1 for keys.
    """
    queries, keys = (_constant(container, part, count) for part in ("q", "k"))
    if keys != 1.0 or queries <= 0:
        raise container.fields.refusal(
            "blk.*.attn_q_norm.weight", f"and attn_k_norm are {queries} and {keys}; expected a positive number and 1"
        )
    return queries


def _constant(container: Container, part: str, count: int) -> float:
    """Return the one value that the norm weights of queries or of keys have in every layer."""
    values = set()
    for i in range(count):
        name = f"blk.{i}.attn_{part}_norm.weight"
        if name not in container.tensors:
            raise container.fields.refusal(name, "is missing")
        stored = container.tensors[name]
        values.update(np.unique(stored.f32(0, stored.shape[0])).tolist())
    if len(values) != 1:
        raise container.fields.refusal(f"blk.*.attn_{part}_norm.weight", "is not the same number everywhere")
    return float(values.pop())


def _attention_scale(factor: float, head_dim: int) -> float:
    return as_f32(as_f32(factor) / math.sqrt(head_dim))


def _from_config(outer: Fields) -> ModelSpec:
    fields = text_fields(outer, DEFAULTS)
    base = config_base(fields, NAME, ConfigNames("hidden_activation"))
    count, window = len(base.layers), fields.integer("sliding_window")
    usual = tuple((count - 1 - i) % PERIOD != 0 for i in range(count))
    kinds = layer_kinds(fields, count) or usual
    if kinds != usual and not fields.has("layer_rope_theta"):
        # Of a missing list transformers makes the usual pattern, mlx-lm one that follows layer_types.
        raise fields.refusal(
            "layer_rope_theta",
            f"is missing, and layer_types is not full attention at every {PERIOD}th layer counted from the last; "
            "only a list would say which layers have no positions",
        )
    ropes = _ropes(fields, count, base.head_dim)
    return replace(
        base,
        layers=tuple(LayerSpec(window if slides else None, rope) for slides, rope in zip(kinds, ropes, strict=True)),
        attention_scale=_attention_scale(fields.number("qk_scale_factor"), base.head_dim),
        post_norm_eps=as_f32(fields.number("post_norm_eps")),
        logit_scale=as_f32(fields.number("output_multiplier")),
        logit_softcap=as_f32(fields.number("final_logit_softcapping")),
    )


def _ropes(fields: Fields, count: int, head_dim: int) -> tuple[RopeSpec | None, ...]:
    """Return each layer's positions: a base of 0 in `layer_rope_theta` means none.

    Without that list every fourth layer, counted from the last, has none. There is no usual base: the
    reference implementations fall back to different ones, so a config must give it.
    """
    name = "layer_rope_theta"
    bases = fields.get(name)
    if bases is None:
        rope = config_rope(fields, head_dim, theta=None)
        return tuple(rope if (count - 1 - i) % PERIOD else None for i in range(count))
    if not isinstance(bases, list) or len(bases) != count:
        raise fields.refusal(name, f"does not give a base for each of {count} layers")
    rope = config_rope(fields, head_dim, theta=_one_base(fields, bases))
    return tuple(rope if base else None for base in bases)


def _one_base(fields: Fields, bases: list[object]) -> float | None:
    """Return the one base in `layer_rope_theta` that is not 0, or None when all are."""
    name = "layer_rope_theta"
    given = Fields(fields.path, {f"{name}[{i}]": base for i, base in enumerate(bases) if base != 0})
    found = {given.number(key) for key in given.values}
    if len(found) > 1:
        raise fields.refusal(name, f"has the bases {', '.join(map(str, sorted(found)))}; expected one, and 0 for none")
    return found.pop() if found else None


FAMILY = Family(
    name=NAME,
    gguf_architecture=GGUF_NAME,
    model_types=(NAME, "muse_glimmer_text"),
    spec=spec,
    entries=entries,
    asides=(
        Aside(re.compile(r"blk\.\d+\.attn_[qk]_norm\.weight"), "constants, read into the description"),
        Aside(re.compile(r"(model\.)?(vision_tower|vision_adapter|vision_projection)\..*"), "vision"),
        Aside(re.compile(DRAFTER), "drafter"),
    ),
)
