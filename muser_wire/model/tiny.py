"""A tiny random llama checkpoint in the Hugging Face format: what tests and dry runs load instead of a real model."""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from muser_wire.model.bytelevel import byte_letters

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONTROL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "bos_token": SPECIALS[1],
    "eos_token": SPECIALS[2],
    "chat_template": CHATML,
}
# Queries and keys this large give attention scores of about this spread: sharp enough that a token's
# logits depend on which tokens came before, so greedy text wanders and does not repeat one token.
SCORE_SPREAD = 4.0
# Logits of the special tokens are this much smaller than the others, so that greedy text does not end by chance.
SPECIAL_SCALE = 0.01


def write_tiny_llama(
    out: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    ffn: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 512,
    max_positions: int = 2048,
    seed: int = 0,
    tied: bool = False,
    dtype: str = "F32",
) -> None:
    """Write a random llama checkpoint into the folder `out`: config, weights, tokenizer, ChatML template.

    `dtype` is how the weights are stored: F32, F16 or BF16. Equal arguments give equal bytes. Logits
    have about unit spread. The tokenizer is a byte-level BPE whose first three ids are `SPECIALS`.

    Raises:
        ValueError: the vocabulary is below 259 or above 988 tokens, or `dtype` is unknown.
    """
    layer_shapes = _layer_shapes(hidden, ffn, heads * head_dim, kv_heads * head_dim)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer_shapes.items()}
    rng = np.random.default_rng(seed)
    tensors = {name: _values(rng, name, shape) for name, shape in {**_outer_shapes(vocab, hidden), **shapes}.items()}
    if tied:
        del tensors["lm_head.weight"]
    config = {
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
    }
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "tokenizer.json", _tokenizer(vocab))
    _write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(out / "config.json", {**CONFIG, **config})
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _outer_shapes(vocab: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor outside the layers."""
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def _layer_shapes(hidden: int, ffn: int, q_rows: int, kv_rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of one layer under its Hugging Face name."""
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return random float32 weights that keep activations near unit scale."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.float32(1) + np.float32(0.1) * noise
    scale = shape[-1] ** -0.5
    if "q_proj" in name or "k_proj" in name:
        scale *= SCORE_SPREAD**0.5
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        noise[: len(SPECIALS)] *= np.float32(SPECIAL_SCALE)
    return np.float32(scale) * noise


def safetensors_bytes(tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]], dtype: str) -> bytes:
    """Return float32 tensors as the bytes of a safetensors file that stores them as F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, values in tensors.items():
        data = _stored(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data section starts on a multiple of 8, so that readers can map it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _stored(values: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    """Return little-endian bytes of `values`, rounded to nearest even where `dtype` is narrower."""
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        # Adding half a unit, less one for an even last bit, makes the truncation below round to nearest even.
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (rounded >> np.uint32(16)).astype("<u2").tobytes()
    raise ValueError(f"dtype {dtype} is not one of F32, F16, BF16")


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return tokenizer.json of a byte-level BPE: specials, the 256 bytes, then merged pairs of letters."""
    letters = "\u0120etaoinshrdlucmfwypvbgkjqxz"
    base = [*SPECIALS, *byte_letters()]
    merges = [list(pair) for pair in islice(product(letters, repeat=2), max(0, vocab_size - len(base)))]
    if len(base) + len(merges) != vocab_size:
        raise ValueError(f"a tiny vocabulary has 259 to {len(base) + len(letters) ** 2} tokens, not {vocab_size}")
    tokens = [*base, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": spelling, **CONTROL} for i, spelling in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
