"""What a GGUF file says about a model beside its weights, and the order in which it keeps rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from muser_wire.model.checkpoint import rotate_half_rows
from muser_wire.model.spec import Llama3Scaling, ModelSpec, RopeSpec


def interleaved(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Return rows whose pairs (i, i + head_dim / 2) of each head now stand side by side."""
    stored = np.empty_like(rows)
    stored[rotate_half_rows(heads, rows.shape[0] // heads)] = rows
    return stored


def add_geometry(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add sizes, and what every family writes down in the same way."""
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def add_conventions(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add what families write down in different ways: positions, windows, constants."""
    arch, layers = writer.arch, spec.layers
    ropes = {layer.window: layer.rope for layer in layers}
    # Gemma's file holds the base of full layers, Muse Glimmer's that of the sliding ones, which alone have any.
    rope = ropes.get(None) or next(iter(ropes.values()))
    if rope is not None:
        writer.add_rope_freq_base(rope.theta)
        _add_llama3_divisors(writer, rope)
    windows = [layer.window for layer in layers if layer.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
        if spec.family != "llama":
            pattern = [layer.window is not None for layer in layers]
            writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
    if spec.family == "gemma3":
        writer.add_attention_scale(spec.attention_scale)
    if spec.logit_scale != 1.0:
        writer.add_logit_scale(spec.logit_scale)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.qk_norm is not None and not spec.qk_norm.weighted:
        queries = np.float32(spec.attention_scale * math.sqrt(spec.head_dim))
        for i in range(len(layers)):
            for part, value in (("q", queries), ("k", np.float32(1))):
                writer.add_tensor(f"blk.{i}.attn_{part}_norm.weight", np.full(spec.head_dim, value, np.float32))


def _add_llama3_divisors(writer: GGUFWriter, rope: RopeSpec) -> None:
    if isinstance(rope.scaling, Llama3Scaling):
        plain = np.array(RopeSpec(rope.theta, rope.rotary_dim).inverse_frequencies())
        writer.add_tensor("rope_freqs.weight", (plain / np.array(rope.inverse_frequencies())).astype(np.float32))
        # Divisors do not tell it where no pair is blended. llama.cpp reads it only for other kinds of stretching.
        writer.add_rope_scaling_orig_ctx_len(rope.scaling.original_max_positions)
