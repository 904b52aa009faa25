"""The tensors of a decoder: which ones a spec calls for, and how containers spell their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from muser_wire.model.container import Container
from muser_wire.model.families.description import TensorEntry
from muser_wire.model.spec import ModelSpec


@dataclass(frozen=True)
class Names:
    """How one container spells tensor names; `parts` gives each part of a layer its name there.

    `interleaved` and `centred` are conventions of storage, as `TensorEntry` has them: the first for
    queries and keys, the second for the parts that it lists.
    """

    embed: str
    final_norm: str
    head: str
    layer: str
    parts: Mapping[str, str]
    interleaved: bool = False
    centred: frozenset[str] = frozenset()

    def below(self, prefix: str) -> Names:
        """Return the names of a checkpoint that keeps the decoder under `prefix` instead of "model."."""
        at = {name: prefix + getattr(self, name).removeprefix("model.") for name in ("embed", "final_norm", "layer")}
        return replace(self, **at)


def gguf_names(parts: Mapping[str, str], *, interleaved: bool = False) -> Names:
    """Return the names of a GGUF file with these names of parts."""
    return Names(
        embed="token_embd.weight",
        final_norm="output_norm.weight",
        head="output.weight",
        layer="blk.{}.{}.weight",
        parts=parts,
        interleaved=interleaved,
    )


def folder_names(parts: Mapping[str, str], *, centred: Iterable[str] = ()) -> Names:
    """Return the names of a Hugging Face folder with these names of parts."""
    return Names(
        embed="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        layer="model.layers.{}.{}.weight",
        parts=parts,
        centred=frozenset(centred),
    )


GGUF_PARTS = {
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
FOLDER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Where each half of a layer ends with a norm of its own, the names of the norms shift.
GGUF_POST_NORMS = {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
FOLDER_POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GGUF_QK_NORMS = {"attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
FOLDER_QK_NORMS = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a layer of this spec has, in canonical order."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weighted = spec.qk_norm is not None and spec.qk_norm.weighted
    qk_norms = dict.fromkeys(("attn.q_norm", "attn.k_norm"), (spec.head_dim,)) if weighted else {}
    post = spec.post_norm_eps is not None
    return {
        "attn_norm": (hidden,),
        "attn.q": (q_rows, hidden),
        "attn.k": (kv_rows, hidden),
        "attn.v": (kv_rows, hidden),
        **qk_norms,
        **({"attn.gate": (q_rows, hidden)} if spec.attention_gate else {}),
        "attn.o": (hidden, q_rows),
        **({"attn_post_norm": (hidden,)} if post else {}),
        "mlp_norm": (hidden,),
        "mlp.gate": (ffn, hidden),
        "mlp.up": (ffn, hidden),
        "mlp.down": (hidden, ffn),
        **({"mlp_post_norm": (hidden,)} if post else {}),
    }


def tensor_entries(spec: ModelSpec, names: Names) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order: embedding, layers ascending, final norm, head."""
    vocab_shape = (spec.vocab_size, spec.hidden_size)
    interleaved = {"attn.q": spec.heads, "attn.k": spec.kv_heads} if names.interleaved else {}
    found = [TensorEntry("embed.weight", vocab_shape, names.embed)]
    shapes = layer_shapes(spec)
    for i in range(len(spec.layers)):
        for part, shape in shapes.items():
            source = names.layer.format(i, names.parts[part])
            heads, centred = interleaved.get(part, 0), part in names.centred
            found.append(TensorEntry(f"layers.{i}.{part}.weight", shape, source, heads, centred))
    final_centred = "final_norm" in names.centred
    found.append(TensorEntry("final_norm.weight", (spec.hidden_size,), names.final_norm, centred=final_centred))
    if not spec.tied_embeddings:
        found.append(TensorEntry("head.weight", vocab_shape, names.head))
    return tuple(found)


# Where a checkpoint with more than a text decoder keeps it: as transformers writes it, and as MLX and older hubs do.
NESTED_PREFIXES = ("model.language_model.", "language_model.model.")


def nested_names(names: Names, container: Container) -> Names:
    """Return the names under the prefix that the container's own tensors have."""
    for prefix in NESTED_PREFIXES:
        at = names.below(prefix)
        if at.embed in container.tensors:
            head = next(
                (head for head in (names.head, f"language_model.{names.head}") if head in container.tensors), ""
            )
            return replace(at, head=head or names.head)
    return names
