"""The llama family: full attention with rotary positions on every layer, SwiGLU, no biases.

SmolLM2 belongs to it. What the description cannot say yet (biases, stretched RoPE, sliding
windows, experts) is refused by the name of the field that asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families.description import Family, TensorEntry
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec, as_f32

NAME = "llama"
DEFAULT_THETA = 10000.0
# Bounds on single sizes: far above published models, small enough that nothing derived from them is costly.
MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_WIDTH = 1 << 24

LATER = "this is not supported yet"

# Fields of a GGUF file beyond general.* and tokenizer.* that are read, or that change no number.
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


@dataclass(frozen=True)
class _Names:
    """How one container spells the tensor names; `layers` are in canonical order, suffix by suffix."""

    embed: str
    final_norm: str
    head: str
    layer: str
    parts: Mapping[str, str]
    interleaved: bool


_GGUF = _Names(
    embed="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.{}.weight",
    parts={
        "attn_norm": "attn_norm",
        "attn.q": "attn_q",
        "attn.k": "attn_k",
        "attn.v": "attn_v",
        "attn.o": "attn_output",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    },
    interleaved=True,
)
_SAFETENSORS = _Names(
    embed="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.{}.weight",
    parts={
        "attn_norm": "input_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    interleaved=False,
)
_NAMES = {ContainerKind.GGUF: _GGUF, ContainerKind.SAFETENSORS: _SAFETENSORS}


def entries(spec: ModelSpec, kind: ContainerKind) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order: embedding, layers ascending, final norm, head."""
    names = _NAMES[kind]
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {
        "attn_norm": (hidden,),
        "attn.q": (q_rows, hidden),
        "attn.k": (kv_rows, hidden),
        "attn.v": (kv_rows, hidden),
        "attn.o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "mlp.gate": (ffn, hidden),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
    }
    interleaved = {"attn.q": spec.heads, "attn.k": spec.kv_heads} if names.interleaved else {}
    found = [TensorEntry("embed.weight", (spec.vocab_size, hidden), names.embed)]
    for i in range(len(spec.layers)):
        for part, shape in shapes.items():
            source = names.layer.format(i, names.parts[part])
            found.append(TensorEntry(f"layers.{i}.{part}.weight", shape, source, interleaved.get(part, 0)))
    found.append(TensorEntry("final_norm.weight", (hidden,), names.final_norm))
    if not spec.tied_embeddings:
        found.append(TensorEntry("head.weight", (spec.vocab_size, hidden), names.head))
    return tuple(found)


def spec(container: Container) -> ModelSpec:
    """Return the spec of a llama checkpoint.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    if container.kind is ContainerKind.GGUF:
        return _spec_from_gguf(container)
    return _spec_from_config(container.fields)


def _spec_from_gguf(container: Container) -> ModelSpec:
    fields = container.fields
    _refuse_gguf_extras(fields)
    heads = fields.integer("llama.attention.head_count", at_most=MAX_HEADS)
    hidden = fields.integer("llama.embedding_length", at_most=MAX_WIDTH)
    head_dim = _head_dim(fields, "llama.attention.key_length", hidden, heads)
    fields.require("llama.attention.value_length", head_dim, why=f"keys have {head_dim}; {LATER}")
    fields.require("llama.rope.dimension_count", head_dim, why=f"heads have {head_dim}; {LATER}")
    theta = fields.number("llama.rope.freq_base", default=DEFAULT_THETA)
    embed = container.tensors.get(_GGUF.embed)
    # A file without a vocab_size leaves the number of rows of the embedding to say it.
    vocab = fields.integer("llama.vocab_size", at_most=MAX_WIDTH, default=embed.shape[0] if embed else None)
    return ModelSpec(
        family=NAME,
        layers=_layers(fields.integer("llama.block_count", at_most=MAX_LAYERS), theta, head_dim),
        hidden_size=hidden,
        ffn_size=fields.integer("llama.feed_forward_length", at_most=MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(fields, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=fields.integer("llama.context_length"),
        norm_eps=as_f32(fields.number("llama.attention.layer_norm_rms_epsilon")),
        tied_embeddings=_GGUF.head not in container.tensors,
    )


def _refuse_gguf_extras(fields: Fields) -> None:
    """Refuse a llama.* field that nobody here reads: it would change what the weights mean."""
    for name in fields.values:
        if name.startswith("llama.") and name.removeprefix("llama.") not in GGUF_FIELDS:
            raise fields.refusal(name, f"is {fields.shown(fields.get(name))}: {LATER}")
    fields.require("llama.rope.scaling.type", "none", why=f"stretched RoPE; {LATER}")
    fields.require("llama.expert_count", 0, why=f"mixtures of experts; {LATER}")


def _spec_from_config(fields: Fields) -> ModelSpec:
    _refuse_config_extras(fields)
    heads = fields.integer("num_attention_heads", at_most=MAX_HEADS)
    hidden = fields.integer("hidden_size", at_most=MAX_WIDTH)
    head_dim = _head_dim(fields, "head_dim", hidden, heads)
    return ModelSpec(
        family=NAME,
        layers=_layers(fields.integer("num_hidden_layers", at_most=MAX_LAYERS), _config_theta(fields), head_dim),
        hidden_size=hidden,
        ffn_size=fields.integer("intermediate_size", at_most=MAX_WIDTH),
        heads=heads,
        kv_heads=_kv_heads(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", at_most=MAX_WIDTH),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=as_f32(fields.number("rms_norm_eps")),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
    )


def _refuse_config_extras(fields: Fields) -> None:
    """Refuse what a config can ask for and the description cannot say."""
    fields.require("attention_bias", False, why=f"biases; {LATER}")
    fields.require("mlp_bias", False, why=f"biases; {LATER}")
    fields.require("hidden_act", "silu", why=f"only silu; {LATER}")
    fields.require("sliding_window", why=f"sliding windows; {LATER}")
    fields.require("partial_rotary_factor", 1, why=f"partial RoPE; {LATER}")
    fields.require("quantization_config", why=f"quantised safetensors; {LATER}")
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        raise fields.refusal("layer_types", f"names other kinds than full_attention; {LATER}")


def _config_theta(fields: Fields) -> float:
    """Return the RoPE base. Newer configs keep it in `rope_parameters`, older ones beside `rope_scaling`."""
    theta = fields.number("rope_theta", default=DEFAULT_THETA)
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.refusal(name, f"is {fields.shown(value)}; expected an object")
        inner = Fields(fields.path, {f"{name}.{key}": item for key, item in value.items()})
        for key in ("rope_type", "type"):
            inner.require(f"{name}.{key}", "default", why=f"stretched RoPE; {LATER}")
        extra = set(value) - {"rope_type", "type", "rope_theta"}
        if extra:
            raise fields.refusal(name, f"holds {', '.join(sorted(extra))}; {LATER}")
        theta = inner.number(f"{name}.rope_theta", default=theta)
    return theta


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


def _layers(count: int, theta: float, head_dim: int) -> tuple[LayerSpec, ...]:
    return (LayerSpec(window=None, rope=RopeSpec(as_f32(theta), head_dim)),) * count


FAMILY = Family(name=NAME, gguf_architecture="llama", model_type="llama", spec=spec, entries=entries)
