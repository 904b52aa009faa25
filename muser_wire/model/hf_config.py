"""A description as a Hugging Face config: what reference implementations read.

The way back from a spec, so that a checkpoint in any container can be given to them.
"""

from __future__ import annotations

from typing import Any

from muser_wire.errors import CheckpointError
from muser_wire.model.spec import LinearScaling, ModelSpec, RopeSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of config.json for a model of this spec.

    Whoever needs to be sure reads it back: not every spec can be said.

    Raises:
        CheckpointError: the family has no config here.
    """
    writers = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3, "muse_glimmer": _muse_glimmer}
    if spec.family not in writers:
        raise CheckpointError(f"a {spec.family} model has no config in the Hugging Face format here")
    return {"tie_word_embeddings": spec.tied_embeddings, "torch_dtype": "float32", **writers[spec.family](spec)}


def _shared(spec: ModelSpec) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": len(spec.layers),
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
    }


def _kinds(spec: ModelSpec) -> dict[str, Any]:
    """Return which layers slide, and their window."""
    windows = [layer.window for layer in spec.layers]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def _rope(rope: RopeSpec | None) -> dict[str, Any]:
    """Return base and stretching of positions."""
    if rope is None:
        raise CheckpointError("a model of this family without positions has no config in the Hugging Face format")
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    if isinstance(scaling, LinearScaling):
        return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": "linear", "factor": scaling.factor}}
    stretched = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
    return {"rope_theta": rope.theta, "rope_scaling": stretched}


def _llama(spec: ModelSpec) -> dict[str, Any]:
    """Return a Llama config; where layers slide, a Mistral one."""
    window = spec.layers[0].window
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    if window is not None:
        kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {**kind, "hidden_act": "silu", **_shared(spec), **_rope(spec.layers[0].rope)}


def _qwen3(spec: ModelSpec) -> dict[str, Any]:
    kinds = _kinds(spec)
    slides = kinds["sliding_window"] is not None
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": slides,
        "max_window_layers": 0 if slides else len(spec.layers),
        **_shared(spec),
        **_rope(spec.layers[0].rope),
        **kinds,
    }


def _gemma3(spec: ModelSpec) -> dict[str, Any]:
    kinds = _kinds(spec)
    local, full = (
        next((layer.rope for layer in spec.layers if (layer.window is None) == whole), None) for whole in (False, True)
    )
    period = kinds["layer_types"].index(FULL) + 1 if full is not None else len(spec.layers) + 1
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": spec.logit_softcap,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(spec.attention_scale**-2),
        "sliding_window_pattern": period,
        **_shared(spec),
        **_rope(full or local),
        **({} if local is None else {"rope_local_base_freq": local.theta}),
        **kinds,
    }


def _muse_glimmer(spec: ModelSpec) -> dict[str, Any]:
    """Return a multimodal config, the only kind that references read, with the smallest vision tower they build."""
    bases = [0 if layer.rope is None else layer.rope.theta for layer in spec.layers]
    theta = max(bases)
    text = {
        "model_type": "muse_glimmer_text",
        "final_logit_softcapping": spec.logit_softcap,
        "hidden_activation": "silu",
        "layer_rope_theta": bases,
        "output_multiplier": spec.logit_scale,
        "post_norm_eps": spec.post_norm_eps,
        "qk_scale_factor": spec.attention_scale * spec.head_dim**0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": spec.tied_embeddings,
        **_shared(spec),
        **_kinds(spec),
    }
    vision = {
        "model_type": "muse_glimmer_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    return {
        "model_type": "muse_glimmer",
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        # Beyond the vocabulary: no token stands for a picture.
        "image_token_id": spec.vocab_size,
        "video_token_id": spec.vocab_size + 1,
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
        "text_config": text,
        "vision_config": vision,
    }
