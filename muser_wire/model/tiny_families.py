"""What the tiny checkpoint of each family says about itself: config.json, control tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TinySizes:
    """The sizes of a tiny checkpoint. `window` is that of the sliding layers, in families that have such."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    window: int


@dataclass(frozen=True)
class TinyFamily:
    """A family's own part of a tiny checkpoint.

    `specials` are its control tokens, ids 0 upward; `bos` and `ends` are among them. `score_spread` is the
    standard deviation of attention scores: sharp enough that a token's logits depend on which tokens came
    before, so that greedy text wanders and does not repeat one token. Where queries and keys are normalised
    it is the norms' doing, and `norm_weight` the mean of their weights. `tied` is what the family's
    published models are.
    """

    architecture: str
    config: Callable[[TinySizes], dict[str, Any]]
    specials: tuple[str, ...]
    bos: str
    ends: tuple[str, ...]
    template: str
    adds_bos: bool = False
    tied: bool = False
    norm_weight: float = 1.0
    score_spread: float = 4.0


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHANNELS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}"
    "{% if message['role'] == 'assistant' %} to=user{% endif %}<|message|>{{ message['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that pairs of all three speeds make a difference within a few hundred tokens.
    "original_max_position_embeddings": 256,
}


def _sizes(sizes: TinySizes) -> dict[str, Any]:
    return {
        "head_dim": sizes.head_dim,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "max_position_embeddings": sizes.max_positions,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocab,
    }


def _llama(sizes: TinySizes) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        **_sizes(sizes),
    }


def _llama3(sizes: TinySizes) -> dict[str, Any]:
    return {**_llama(sizes), "rope_scaling": LLAMA3_SCALING}


def _mistral(sizes: TinySizes) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": sizes.window,
        **_sizes(sizes),
    }


def _qwen3(sizes: TinySizes) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "max_window_layers": sizes.layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        **_sizes(sizes),
    }


def _gemma3(sizes: TinySizes) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        # Not the head size, so that a reader who confuses the two is found out.
        "query_pre_attn_scalar": sizes.head_dim * 3 // 2,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "sliding_window": sizes.window,
        "sliding_window_pattern": 6,
        **_sizes(sizes),
    }


def _muse_glimmer(sizes: TinySizes) -> dict[str, Any]:
    """Return a multimodal config. The weights of the small vision tower that it mentions are left out."""
    full = [(sizes.layers - 1 - i) % 4 == 0 for i in range(sizes.layers)]
    text = {
        "model_type": "muse_glimmer_text",
        "attention_bias": False,
        "final_logit_softcapping": 20.0,
        "hidden_activation": "silu",
        "layer_rope_theta": [0 if nope else 500_000.0 for nope in full],
        "layer_types": ["full_attention" if nope else "sliding_attention" for nope in full],
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "sliding_window": sizes.window,
        **_sizes(sizes),
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
        # No token of this vocabulary stands for a picture.
        "image_token_id": sizes.vocab,
        "video_token_id": sizes.vocab + 1,
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
        "text_config": text,
        "vision_config": vision,
    }


_CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = TinyFamily("LlamaForCausalLM", _llama, _CHATML_SPECIALS, "<|im_start|>", ("<|im_end|>",), CHATML)

TINY_FAMILIES = {
    "llama": _CHATML,
    # Slow positions let errors of rounding grow; softer scores keep them as small as in the other families.
    "llama3": replace(_CHATML, config=_llama3, score_spread=3.0),
    "mistral": replace(_CHATML, architecture="MistralForCausalLM", config=_mistral),
    "qwen3": replace(_CHATML, architecture="Qwen3ForCausalLM", config=_qwen3, norm_weight=2.0),
    "gemma3": TinyFamily(
        "Gemma3ForCausalLM",
        _gemma3,
        specials=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        ends=("<eos>", "<end_of_turn>"),
        template=TURNS,
        adds_bos=True,
        tied=True,
        norm_weight=1.2,
    ),
    "muse_glimmer": TinyFamily(
        "MuseGlimmerForConditionalGeneration",
        _muse_glimmer,
        specials=("<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>", "<|start|>", "<|message|>"),
        bos="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eot|>"),
        template=CHANNELS,
        adds_bos=True,
    ),
}
