"""Published models as data: what their config.json says, so that a plan needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muser_wire.errors import FetchError
from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import family_of
from muser_wire.model.fields import Fields
from muser_wire.model.spec import ModelSpec

_FULL_EVERY_FOURTH = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

CATALOGUE: dict[str, dict[str, Any]] = {
    "muse-glimmer-30b": {
        "model_type": "muse_glimmer",
        "text_config": {
            "final_logit_softcapping": 20.0,
            "head_dim": 128,
            "hidden_activation": "silu",
            "hidden_size": 6656,
            "intermediate_size": 19_968,
            "layer_rope_theta": [500_000.0, 500_000.0, 500_000.0, 0] * 13,
            "layer_types": _FULL_EVERY_FOURTH * 13,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 32,
            "num_hidden_layers": 52,
            "num_key_value_heads": 2,
            "output_multiplier": 0.19611613513818404,
            "post_norm_eps": 1e-8,
            "qk_scale_factor": 3.87,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_window": 2048,
            "tie_word_embeddings": False,
            "vocab_size": 202_048,
        },
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    },
    "smollm2": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49_152,
    },
}


def catalogue_spec(name: str) -> ModelSpec:
    """Return the spec of a published model, from its description alone.

    Raises:
        FetchError: there is none under this name.
    """
    if name not in CATALOGUE:
        raise FetchError(f"{name} is not one of the described models: {', '.join(CATALOGUE)}")
    path = Path(f"{name}/config.json")
    container = Container(path.parent, ContainerKind.SAFETENSORS, Fields(path, CATALOGUE[name]), {})
    return family_of(container).spec(container)
