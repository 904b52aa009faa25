"""The text decoder of Gemma 3: five sliding layers to each full one, a norm on both ends of each half layer.

A multimodal config nests the decoder's fields in `text_config`; small models have them at the top.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families.description import Aside, Family, TensorEntry
from muser_wire.model.families.reading import (
    LATER,
    ConfigNames,
    config_base,
    gguf_base,
    gguf_pattern,
    gguf_rope,
    layer_kinds,
    rope_object,
    text_fields,
)
from muser_wire.model.families.tensors import (
    FOLDER_PARTS,
    FOLDER_POST_NORMS,
    FOLDER_QK_NORMS,
    GGUF_PARTS,
    GGUF_POST_NORMS,
    GGUF_QK_NORMS,
    folder_names,
    gguf_names,
    nested_names,
    tensor_entries,
)
from muser_wire.model.fields import Fields
from muser_wire.model.spec import Activation, LayerSpec, ModelSpec, QKNorm, RopeSpec, as_f32, inverse_sqrt

NAME = "gemma3"
# The base of full layers and of sliding ones; a GGUF file has only the first.
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PERIOD = 6
# The 27B model alone scales scores by hidden size over heads. A GGUF file does not say so; its 62 layers do.
WIDE_SCALE_LAYERS = 62

GGUF_EXTRAS = frozenset(
    {
        "attention.scale",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "rope.freq_base_swa",
        "rope.scaling.factor",
    }
)
DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": PERIOD,
    "tie_word_embeddings": True,
    "vocab_size": 262_208,
}

_GGUF = gguf_names({**GGUF_PARTS, **GGUF_POST_NORMS, **GGUF_QK_NORMS})
_FOLDER = folder_names(
    {**FOLDER_PARTS, **FOLDER_POST_NORMS, **FOLDER_QK_NORMS},
    centred=("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "attn.q_norm", "attn.k_norm", "final_norm"),
)


def entries(spec: ModelSpec, container: Container) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order. A GGUF file holds 1 + w where a folder holds w."""
    return tensor_entries(spec, _GGUF if container.kind is ContainerKind.GGUF else nested_names(_FOLDER, container))


def spec(container: Container) -> ModelSpec:
    """Return the spec of a Gemma 3 checkpoint.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    base = _from_gguf(container) if container.kind is ContainerKind.GGUF else _from_config(container.fields)
    return replace(
        base,
        qk_norm=QKNorm(weighted=True, eps=base.norm_eps),
        post_norm_eps=base.norm_eps,
        activation=Activation.GELU_TANH,
        embedding_scale=as_f32(math.sqrt(base.hidden_size)),
    )


def _from_gguf(container: Container) -> ModelSpec:
    fields = container.fields
    base = gguf_base(container, NAME, also=GGUF_EXTRAS)
    count = len(base.layers)
    full = replace(gguf_rope(fields, base.head_dim), theta=_theta(fields, "gemma3.rope.freq_base", GLOBAL_THETA))
    local = RopeSpec(_theta(fields, "gemma3.rope.freq_base_swa", LOCAL_THETA), base.head_dim)
    window = fields.integer("gemma3.attention.sliding_window")
    cap = "gemma3.final_logit_softcapping"
    return replace(
        base,
        layers=_layers(gguf_pattern(fields, count, default_period=PERIOD), window, local, full),
        attention_scale=_gguf_scale(fields, base),
        logit_softcap=as_f32(fields.number(cap)) if fields.has(cap) else None,
    )


def _gguf_scale(fields: Fields, base: ModelSpec) -> float:
    """Return the factor of scores: what the file says, which published ones do not, or what the size implies."""
    name = "gemma3.attention.scale"
    if fields.has(name):
        return as_f32(fields.number(name))
    wide = len(base.layers) == WIDE_SCALE_LAYERS
    return inverse_sqrt(base.hidden_size / base.heads if wide else base.head_dim)


def _from_config(outer: Fields) -> ModelSpec:
    fields = text_fields(outer, DEFAULTS)
    base = config_base(fields, NAME, ConfigNames("hidden_activation", "gelu_pytorch_tanh"))
    fields.require("attn_logit_softcapping", why=f"soft caps on scores; {LATER}")
    fields.require("use_bidirectional_attention", False, why=f"attention to later tokens; {LATER}")
    full, local = _config_ropes(fields, base.head_dim)
    count, period = len(base.layers), fields.integer("sliding_window_pattern")
    kinds = layer_kinds(fields, count) or tuple((i + 1) % period != 0 for i in range(count))
    cap = "final_logit_softcapping"
    return replace(
        base,
        layers=_layers(kinds, fields.integer("sliding_window"), local, full),
        attention_scale=inverse_sqrt(fields.number("query_pre_attn_scalar")),
        logit_softcap=as_f32(fields.number(cap)) if fields.has(cap) else None,
    )


def _config_ropes(fields: Fields, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the positions of full and of sliding layers. A `rope_scaling` beside two bases is the full ones'."""
    full = RopeSpec(_theta(fields, "rope_theta", GLOBAL_THETA), head_dim)
    local = RopeSpec(_theta(fields, "rope_local_base_freq", LOCAL_THETA), head_dim)
    if fields.has("rope_scaling"):
        full = rope_object(fields, "rope_scaling", fields.get("rope_scaling"), head_dim, full.theta)
    parameters = fields.get("rope_parameters")
    if parameters is None:
        return full, local
    if not isinstance(parameters, dict) or set(parameters) - {"full_attention", "sliding_attention"}:
        raise fields.refusal("rope_parameters", f"is {fields.shown(parameters)}; expected an object for each kind")
    read = {
        kind: rope_object(fields, f"rope_parameters.{kind}", parameters[kind], head_dim, default.theta)
        for kind, default in (("full_attention", full), ("sliding_attention", local))
        if parameters.get(kind) is not None
    }
    return read.get("full_attention", full), read.get("sliding_attention", local)


def _theta(fields: Fields, name: str, default: float) -> float:
    return as_f32(fields.number(name, default=default))


def _layers(kinds: tuple[bool, ...], window: int, local: RopeSpec, full: RopeSpec) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(window, local) if slides else LayerSpec(None, full) for slides in kinds)


FAMILY = Family(
    name=NAME,
    gguf_architecture=NAME,
    model_types=(NAME, "gemma3_text"),
    spec=spec,
    entries=entries,
    asides=(Aside(re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*"), "vision"),),
)
