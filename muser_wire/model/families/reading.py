"""What every family reads alike: sizes, heads and rotary positions, from GGUF metadata and from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muser_wire.model.container import Container
from muser_wire.model.fields import Fields
from muser_wire.model.spec import (
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    RopeSpec,
    as_f32,
    inverse_sqrt,
)

DEFAULT_THETA = 10000.0
# Bounds on single sizes: far above published models, small enough that nothing derived from them is costly.
MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_WIDTH = 1 << 24

LATER = "this is not supported yet"

# Fields of a GGUF file beyond general.* and tokenizer.* that are read for every family, or that change no number.
GGUF_FIELDS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "expert_count",
        "expert_used_count",
        "vocab_size",
    }
)


def gguf_base(container: Container, family: str, *, also: frozenset[str] = frozenset()) -> ModelSpec:
    """Return the spec of a plain decoder with the sizes in a GGUF file: layers without windows and positions.

    `also` names the fields that the family reads beside `GGUF_FIELDS`.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    fields, arch = container.fields, container.fields.text("general.architecture")
    _refuse_gguf_extras(fields, arch, GGUF_FIELDS | also)
    heads = fields.integer(f"{arch}.attention.head_count", at_most=MAX_HEADS)
    hidden = fields.integer(f"{arch}.embedding_length", at_most=MAX_WIDTH)
    head_dim = _head_dim(fields, f"{arch}.attention.key_length", hidden, heads)
    fields.require(f"{arch}.attention.value_length", head_dim, why=f"keys have {head_dim}; {LATER}")
    fields.require(f"{arch}.rope.dimension_count", head_dim, why=f"heads have {head_dim}; {LATER}")
    embed = container.tensors.get("token_embd.weight")
    # A file without a vocab_size leaves the number of rows of the embedding to say it.
    vocab = fields.integer(f"{arch}.vocab_size", at_most=MAX_WIDTH, default=embed.shape[0] if embed else None)
    return ModelSpec(
        family=family,
        layers=(LayerSpec(None, None),) * fields.integer(f"{arch}.block_count", at_most=MAX_LAYERS),
        hidden_size=hidden,
        ffn_size=fields.integer(f"{arch}.feed_forward_length", at_most=MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(fields, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=fields.integer(f"{arch}.context_length"),
        norm_eps=as_f32(fields.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in container.tensors,
        attention_scale=inverse_sqrt(head_dim),
    )


def _refuse_gguf_extras(fields: Fields, arch: str, known: frozenset[str]) -> None:
    """Refuse a field of the architecture that nobody here reads: it would change what the weights mean."""
    for name in fields.values:
        if name.startswith(f"{arch}.") and name.removeprefix(f"{arch}.") not in known:
            raise fields.refusal(name, f"is {fields.shown(fields.get(name))}: {LATER}")
    fields.require(f"{arch}.expert_count", 0, why=f"mixtures of experts; {LATER}")


def gguf_rope(fields: Fields, head_dim: int, *, base: str = "rope.freq_base") -> RopeSpec:
    """Return the rotary positions that a GGUF file's fields describe; their stretching is even or none.

    A file that stretches names its factor; families that allow one list `rope.scaling.factor` among
    the fields they read.
    """
    arch = fields.text("general.architecture")
    theta = as_f32(fields.number(f"{arch}.{base}", default=DEFAULT_THETA))
    kind, factor = f"{arch}.rope.scaling.type", f"{arch}.rope.scaling.factor"
    fields.require(kind, "none", "linear", why=f"stretched RoPE; {LATER}")
    if fields.get(kind) != "linear":
        fields.require(factor, 1, why=f"{kind} does not say how")
        return RopeSpec(theta, head_dim)
    return RopeSpec(theta, head_dim, LinearScaling(as_f32(fields.number(factor))))


@dataclass(frozen=True)
class ConfigNames:
    """What a family's config.json calls the fields whose names differ between families."""

    activation: str = "hidden_act"
    activation_value: str = "silu"


def config_base(fields: Fields, family: str, names: ConfigNames | None = None) -> ModelSpec:
    """Return the spec of a plain decoder with the sizes in a config: layers without windows and positions.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    names = names or ConfigNames()
    _refuse_config_extras(fields, names)
    heads = fields.integer("num_attention_heads", at_most=MAX_HEADS)
    hidden = fields.integer("hidden_size", at_most=MAX_WIDTH)
    head_dim = _head_dim(fields, "head_dim", hidden, heads)
    return ModelSpec(
        family=family,
        layers=(LayerSpec(None, None),) * fields.integer("num_hidden_layers", at_most=MAX_LAYERS),
        hidden_size=hidden,
        ffn_size=fields.integer("intermediate_size", at_most=MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", at_most=MAX_WIDTH),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=as_f32(fields.number("rms_norm_eps")),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_scale=inverse_sqrt(head_dim),
    )


def _refuse_config_extras(fields: Fields, names: ConfigNames) -> None:
    """Refuse what a config can ask for and the description cannot say."""
    fields.require("attention_bias", False, why=f"biases; {LATER}")
    fields.require("mlp_bias", False, why=f"biases; {LATER}")
    fields.require(names.activation, names.activation_value, why=f"only {names.activation_value}; {LATER}")
    fields.require("partial_rotary_factor", 1, why=f"partial RoPE; {LATER}")


def text_fields(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """Return the fields of the text decoder: those in `text_config` where there is one, over the top level's.

    `defaults` are the family's, for configs that leave out what they do not change. A field that is
    there as null stays null.
    """
    nested = fields.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise fields.refusal("text_config", f"is {fields.shown(nested)}; expected an object")
    return Fields(fields.path, {**defaults, **fields.values, **(nested or {})})


def config_rope(fields: Fields, head_dim: int, *, theta: float | None = DEFAULT_THETA) -> RopeSpec:
    """Return the rotary positions that a config describes, of one kind for all layers.

    Newer configs keep everything in `rope_parameters`, older ones the base beside `rope_scaling`.
    `theta` is the base when none is given; None: there must be one.
    """
    if fields.has("rope_theta"):
        theta = fields.number("rope_theta")
    found: RopeSpec | None = None
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is not None:
            found = rope_object(fields, name, value, head_dim, theta)
            theta = found.theta
    if found is None:
        found = RopeSpec(as_f32(fields.number("rope_theta", default=theta)), head_dim)
    return found


def rope_object(fields: Fields, name: str, value: object, head_dim: int, theta: float | None) -> RopeSpec:
    """Return the rotary positions in one object of a config, the field `name`; `theta` is the base if it has none."""
    if not isinstance(value, dict):
        raise fields.refusal(name, f"is {fields.shown(value)}; expected an object")
    inner = Fields(fields.path, {f"{name}.{key}": item for key, item in value.items()})
    for key in ("rope_type", "type"):
        inner.require(f"{name}.{key}", "default", *_SCALINGS, why=f"stretched RoPE of this kind; {LATER}")
    kind = value.get("rope_type") or value.get("type") or "default"
    read = _SCALINGS.get(kind)
    known = {"rope_type", "type", "rope_theta", *(read[0] if read else ())}
    extra = set(value) - known
    if extra:
        raise fields.refusal(name, f"holds {', '.join(sorted(extra))}; {LATER}")
    base = as_f32(inner.number(f"{name}.rope_theta", default=theta))
    return RopeSpec(base, head_dim, read[1](inner, name) if read else None)


def _linear(fields: Fields, name: str) -> RopeScaling:
    return LinearScaling(as_f32(fields.number(f"{name}.factor")))


def _llama3(fields: Fields, name: str) -> RopeScaling:
    low, high = (as_f32(fields.number(f"{name}.{key}_freq_factor")) for key in ("low", "high"))
    if low >= high:
        raise fields.refusal(f"{name}.low_freq_factor", f"is {low}, not below high_freq_factor, {high}")
    original = fields.integer(f"{name}.original_max_position_embeddings")
    return Llama3Scaling(as_f32(fields.number(f"{name}.factor")), low, high, original)


_SCALINGS: dict[object, tuple[tuple[str, ...], Callable[[Fields, str], RopeScaling]]] = {
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), _llama3),
}


def layer_kinds(fields: Fields, count: int) -> tuple[bool, ...] | None:
    """Return for each layer whether it slides, as `layer_types` says; None when it does not say."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.refusal("layer_types", f"does not name a kind for each of {count} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise fields.refusal("layer_types", f"names {fields.shown(kind)}; {LATER}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def gguf_pattern(fields: Fields, count: int, *, default_period: int) -> tuple[bool, ...]:
    """Return for each layer whether it slides, by `attention.sliding_window_pattern`.

    The field is an array of truth values, or a period of which the last layer is full.
    """
    name = f"{fields.text('general.architecture')}.attention.sliding_window_pattern"
    value = fields.get(name)
    if isinstance(value, list):
        if len(value) != count or not all(isinstance(item, bool) for item in value):
            raise fields.refusal(name, f"does not give a truth value for each of {count} layers")
        return tuple(value)
    period = fields.integer(name, at_most=MAX_LAYERS, default=default_period)
    return tuple((i + 1) % period != 0 for i in range(count))


def _head_dim(fields: Fields, name: str, hidden: int, heads: int) -> int:
    """Return the explicit head size, or hidden size over heads."""
    head_dim = fields.integer(name, at_most=MAX_HEADS) if fields.has(name) else hidden // heads
    if not fields.has(name) and hidden % heads:
        raise fields.refusal(name, f"is missing, and {heads} heads do not divide a hidden size of {hidden}")
    if head_dim % 2:
        raise fields.refusal(name, f"is {head_dim}; RoPE needs an even number")
    return head_dim


def _kv_heads(fields: Fields, name: str, heads: int) -> int:
    kv_heads = fields.integer(name, at_most=MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise fields.refusal(name, f"is {kv_heads}, which does not divide {heads} query heads")
    return kv_heads
