"""The llama family: full attention with rotary positions on every layer, SwiGLU, no biases.

Llama 3 stretches its positions, Mistral's first models slide; SmolLM2 is plain. What the description
cannot say (biases, other stretchings, experts) is refused by the name of the field that asks for it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families.description import Aside, Family, TensorEntry
from muser_wire.model.families.reading import LATER, config_base, config_rope, gguf_base, gguf_rope
from muser_wire.model.families.tensors import FOLDER_PARTS, GGUF_PARTS, folder_names, gguf_names, tensor_entries
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LayerSpec, Llama3Scaling, ModelSpec, RopeSpec, as_f32

NAME = "llama"
MISTRAL = "mistral"
# What a Mistral config means that does not mention its window. Later ones say null: no window.
MISTRAL_WINDOW = 4096

GGUF_EXTRAS = frozenset({"attention.sliding_window", "rope.scaling.factor", "rope.scaling.original_context_length"})
ORIGINAL_CONTEXT = f"{NAME}.rope.scaling.original_context_length"
DIVISORS = "rope_freqs.weight"
# A GGUF file keeps Llama 3's stretching as one divisor for each pair. All published models agree in these
# three numbers, so the largest divisor, the factor, tells the rest; the last may stand in a field.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192

_GGUF = gguf_names(GGUF_PARTS, interleaved=True)
_FOLDER = folder_names(FOLDER_PARTS)


def entries(spec: ModelSpec, container: Container) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order."""
    return tensor_entries(spec, _GGUF if container.kind is ContainerKind.GGUF else _FOLDER)


def spec(container: Container) -> ModelSpec:
    """Return the spec of a llama or Mistral checkpoint.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    if container.kind is ContainerKind.GGUF:
        return _spec_from_gguf(container)
    return _spec_from_config(container.fields)


def _spec_from_gguf(container: Container) -> ModelSpec:
    fields = container.fields
    base = gguf_base(container, NAME, also=GGUF_EXTRAS)
    rope = gguf_rope(fields, base.head_dim)
    if DIVISORS in container.tensors:
        rope = replace(rope, scaling=_llama3_scaling(container, rope))
    elif fields.has(ORIGINAL_CONTEXT):
        raise fields.refusal(ORIGINAL_CONTEXT, f"is there without {DIVISORS}; {LATER}")
    name = "llama.attention.sliding_window"
    window = fields.integer(name) if fields.has(name) else None
    return replace(base, layers=(LayerSpec(window, rope),) * len(base.layers))


def _llama3_scaling(container: Container, rope: RopeSpec) -> Llama3Scaling:
    """Return the stretching whose divisors a file holds, after checking each of them."""
    original = container.fields.integer(ORIGINAL_CONTEXT, default=LLAMA3_ORIGINAL)
    stored = container.tensors[DIVISORS]
    divisors = stored.f32(0, stored.shape[0]).reshape(-1)
    if rope.scaling is not None or stored.shape != (rope.rotary_dim // 2,):
        raise container.fields.refusal(DIVISORS, f"has shape {list(stored.shape)}, or a field stretches as well")
    scaling = Llama3Scaling(as_f32(float(divisors.max())), LLAMA3_LOW, LLAMA3_HIGH, original)
    stretched = replace(rope, scaling=scaling).inverse_frequencies()
    expected = np.divide(rope.inverse_frequencies(), stretched)
    # The file's writer computed in float32.
    if not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise container.fields.refusal(DIVISORS, f"does not hold Llama 3's divisors for a factor of {scaling.factor}")
    return scaling


def _spec_from_config(fields: Fields) -> ModelSpec:
    base = config_base(fields, NAME)
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        raise fields.refusal("layer_types", f"names other kinds than full_attention; {LATER}")
    rope = config_rope(fields, base.head_dim)
    return replace(base, layers=(LayerSpec(_window(fields), rope),) * len(base.layers))


def _window(fields: Fields) -> int | None:
    """Return the window of every layer. Only Mistral's configs mean it: those of Llama give none."""
    if fields.get("model_type") != MISTRAL:
        fields.require("sliding_window", why=f"sliding windows in a llama config; {LATER}")
        return None
    if "sliding_window" not in fields.values:
        return MISTRAL_WINDOW
    return fields.integer("sliding_window") if fields.has("sliding_window") else None


FAMILY = Family(
    name=NAME,
    gguf_architecture="llama",
    model_types=(NAME, MISTRAL),
    spec=spec,
    entries=entries,
    asides=(
        Aside(re.compile(r"rope_freqs\.weight"), "stretching of positions, read into the description"),
        Aside(re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"), "frequencies that the base gives"),
    ),
)
