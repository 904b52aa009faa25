"""The same tiny checkpoint as a GGUF file, in any encoding that the `gguf` package can write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from muser_wire.model.encodings import decode_f32
from muser_wire.model.jsonfile import read_object
from muser_wire.model.safetensors import read_safetensors

SUFFIXES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(out: Path, folder: Path, *, encoding: str = "F32") -> None:
    """Write the checkpoint that `write_tiny_llama` made in `folder` as the GGUF file `out`.

    Matrices are stored as `encoding`, such as "Q4_1", vectors as F32. As in real files, the rows of
    queries and keys are in interleaved RoPE order. With F32 it is the same model in every bit.
    """
    config = read_object(folder / "config.json")
    writer = GGUFWriter(out, "llama")
    _add_geometry(writer, config)
    _add_tokenizer(writer, folder)
    kind = GGMLQuantizationType[encoding]
    for name, stored in read_safetensors(folder / "model.safetensors").items():
        values = decode_f32(stored.encoding, stored.data, stored.shape)
        if ".q_proj" in name or ".k_proj" in name:
            values = _interleave(values, config["head_dim"])
        if values.ndim == 1 or encoding == "F32":
            writer.add_tensor(_gguf_name(name), values)
        else:
            writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(rows: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Return rows whose pairs (i, i + head_dim / 2) of each head now stand side by side."""
    heads = rows.shape[0] // head_dim
    pairs = rows.reshape(heads, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, index, suffix = name.removesuffix(".weight").split(".", 3)
    return f"blk.{index}.{SUFFIXES[suffix]}.weight"


def _add_geometry(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    content = read_object(folder / "tokenizer.json")
    config = read_object(folder / "tokenizer_config.json")
    ids: dict[str, int] = content["model"]["vocab"]
    control = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_add_bos_token(config["add_bos_token"])
    writer.add_chat_template(config["chat_template"])
