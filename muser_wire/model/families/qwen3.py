"""The dense Qwen 3 family: llama's layers with a weighted RMSNorm on queries and keys."""

from __future__ import annotations

from dataclasses import replace

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families.description import Family, TensorEntry
from muser_wire.model.families.reading import config_base, config_rope, gguf_base, gguf_rope, layer_kinds
from muser_wire.model.families.tensors import (
    FOLDER_PARTS,
    FOLDER_QK_NORMS,
    GGUF_PARTS,
    GGUF_QK_NORMS,
    folder_names,
    gguf_names,
    tensor_entries,
)
from muser_wire.model.fields import Fields
from muser_wire.model.spec import LayerSpec, ModelSpec, QKNorm

NAME = "qwen3"
GGUF_EXTRAS = frozenset({"rope.scaling.factor"})
DEFAULT_HEAD_DIM = 128

_GGUF = gguf_names({**GGUF_PARTS, **GGUF_QK_NORMS})
_FOLDER = folder_names({**FOLDER_PARTS, **FOLDER_QK_NORMS})


def entries(spec: ModelSpec, container: Container) -> tuple[TensorEntry, ...]:
    """Return every tensor in canonical order."""
    return tensor_entries(spec, _GGUF if container.kind is ContainerKind.GGUF else _FOLDER)


def spec(container: Container) -> ModelSpec:
    """Return the spec of a Qwen 3 checkpoint.

    Raises:
        CheckpointError: a field is missing, out of range, or asks for what is not supported.
    """
    fields = container.fields
    if container.kind is ContainerKind.GGUF:
        base = gguf_base(container, NAME, also=GGUF_EXTRAS)
        layers = (LayerSpec(None, gguf_rope(fields, base.head_dim)),) * len(base.layers)
    else:
        fields = Fields(fields.path, {"head_dim": DEFAULT_HEAD_DIM, **fields.values})
        base = config_base(fields, NAME)
        rope = config_rope(fields, base.head_dim)
        layers = tuple(LayerSpec(window, rope) for window in _windows(fields, len(base.layers)))
    return replace(base, layers=layers, qk_norm=QKNorm(weighted=True, eps=base.norm_eps))


def _windows(fields: Fields, count: int) -> tuple[int | None, ...]:
    """Return each layer's window. Only `use_sliding_window` gives one, to the layers from `max_window_layers` up."""
    if not fields.flag("use_sliding_window", default=False):
        if any(layer_kinds(fields, count) or ()):
            raise fields.refusal("layer_types", "names sliding_attention, and use_sliding_window is not true")
        return (None,) * count
    window = fields.integer("sliding_window", default=4096)
    first = fields.integer("max_window_layers", default=28)
    kinds = layer_kinds(fields, count) or tuple(i >= first for i in range(count))
    return tuple(window if slides else None for slides in kinds)


FAMILY = Family(name=NAME, gguf_architecture=NAME, model_types=(NAME,), spec=spec, entries=entries)
