"""A float64 forward over a `ModelSpec` in plain numpy: the independent value that both engines are tested against.

It shares no code with either engine and spends no thought on speed: every head is a loop, every position is computed
from the definition, and no cache exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from muser_wire.model.spec import Activation, LinearScaling, Llama3Scaling, ModelSpec, RopeSpec

Array = NDArray[np.float64]
Planes = list[tuple[Array, Array]]
Weights = Callable[[str], Array]


def forward(
    weights: Callable[[str], np.ndarray],
    spec: ModelSpec,
    ids: Sequence[int],
    round_kv: Callable[[Array], Array] | None = None,
) -> tuple[Planes, Array]:
    """Return each layer's keys and values, `[T, kv_heads, head_dim]` each, and the logits `[T, vocab]` of a prompt.

    `weights` gives a tensor by its canonical name. `round_kv` is applied to keys (after rotation) and values before
    attention reads them, and the returned planes are the rounded ones.
    """

    def weight(name: str) -> Array:
        return np.asarray(weights(f"{name}.weight"), dtype=np.float64)

    x = embed(weight("embed"), spec, ids)
    planes: Planes = []
    for i in range(len(spec.layers)):

        def of_layer(name: str, i: int = i) -> Array:
            return weight(f"layers.{i}.{name}")

        y = rms_norm(x, of_layer("attn_norm"), spec.norm_eps)
        q, k, v = projected(of_layer, spec, i, y)
        if round_kv is not None:
            k, v = round_kv(k), round_kv(v)
        planes.append((k, v))
        out = attend(q, k, v, spec.layers[i].window, spec.attention_scale)
        if spec.attention_gate:
            out = out / (1.0 + np.exp(-(y @ of_layer("attn.gate").T)))
        x = x + post_norm(of_layer, spec, "attn", out @ of_layer("attn.o").T)
        y = rms_norm(x, of_layer("mlp_norm"), spec.norm_eps)
        gated = activate(y @ of_layer("mlp.gate").T, spec.activation) * (y @ of_layer("mlp.up").T)
        x = x + post_norm(of_layer, spec, "mlp", gated @ of_layer("mlp.down").T)
    head = weight("embed" if spec.tied_embeddings else "head")
    return planes, capped(rms_norm(x, weight("final_norm"), spec.norm_eps) @ head.T * spec.logit_scale, spec)


def embed(matrix: Array, spec: ModelSpec, ids: Sequence[int]) -> Array:
    """Return the rows of `ids`, scaled and normalised as the spec says."""
    x = matrix[np.asarray(ids)] * spec.embedding_scale
    return rms_norm(x, np.ones(()), spec.norm_eps) if spec.embedding_norm else x


def projected(weight: Weights, spec: ModelSpec, layer: int, y: Array) -> tuple[Array, Array, Array]:
    """Return queries, keys and values, `[T, n, head_dim]` each: normalised, then rotated."""
    q, k, v = (split_heads(y @ weight(f"attn.{name}").T, spec.head_dim) for name in "qkv")
    if spec.qk_norm is not None:
        one = np.ones(spec.head_dim)
        q_weight, k_weight = (weight(f"attn.{name}_norm") if spec.qk_norm.weighted else one for name in "qk")
        q, k = rms_norm(q, q_weight, spec.qk_norm.eps), rms_norm(k, k_weight, spec.qk_norm.eps)
    rope = spec.layers[layer].rope
    return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)


def post_norm(weight: Weights, spec: ModelSpec, half: str, x: Array) -> Array:
    """Return what the residual stream receives from one half of a layer."""
    return x if spec.post_norm_eps is None else rms_norm(x, weight(f"{half}_post_norm"), spec.post_norm_eps)


def activate(x: Array, activation: Activation) -> Array:
    """Return silu(x), or gelu(x) in its tanh form."""
    if activation is Activation.SILU:
        return x / (1.0 + np.exp(-x))
    assert activation is Activation.GELU_TANH
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def capped(logits: Array, spec: ModelSpec) -> Array:
    """Return cap * tanh(logits / cap), or the logits where there is no cap."""
    cap = spec.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def split_heads(x: Array, head_dim: int) -> Array:
    """Return `[T, n * head_dim]` as `[T, n, head_dim]`."""
    return x.reshape(len(x), -1, head_dim)


def rotate(x: Array, rope: RopeSpec) -> Array:
    """Rotate component i with component i + rotary_dim / 2 by the angle p * frequency(i) at position p."""
    half = rope.rotary_dim // 2
    angle = np.arange(len(x))[:, None] * np.array([frequency(rope, i) for i in range(half)])
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def frequency(rope: RopeSpec, i: int) -> float:
    """Return pair i's angle per position: theta^(-2 i / rotary_dim), stretched as the model's publisher defines it."""
    plain = float(rope.theta ** (-2.0 * i / rope.rotary_dim))
    if rope.scaling is None:
        return plain
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    assert isinstance(rope.scaling, Llama3Scaling)
    scaling, wavelength = rope.scaling, 2 * math.pi / plain
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return plain / scaling.factor
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return plain
    smooth = scaling.original_max_positions / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def attend(q: Array, k: Array, v: Array, window: int | None, scale: float) -> Array:
    """Return causal attention `[T, heads * head_dim]`: position p sees t iff 0 <= p - t < window."""
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = (distance >= 0) & (distance < (window if window is not None else tokens + 1))
    out = np.empty_like(q)
    for head in range(heads):
        scores = np.where(visible, q[:, head] @ k[:, head // group].T * scale, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out.reshape(tokens, heads * head_dim)
