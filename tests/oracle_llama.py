"""A float64 forward of the llama family in plain numpy: the independent value that both engines are tested against.

It shares no code with either engine and spends no thought on speed: every head is a loop, every position is computed
from the definition, and no cache exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from muser_wire.model.spec import LinearScaling, Llama3Scaling, ModelSpec, RopeSpec

Array = NDArray[np.float64]
Planes = list[tuple[Array, Array]]


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
        return np.asarray(weights(name), dtype=np.float64)

    x = weight("embed.weight")[np.asarray(ids)]
    planes: Planes = []
    for i, layer in enumerate(spec.layers):

        def of_layer(name: str, i: int = i) -> Array:
            return weight(f"layers.{i}.{name}.weight")

        y = rms_norm(x, of_layer("attn_norm"), spec.norm_eps)
        q, k, v = (split_heads(y @ of_layer(f"attn.{name}").T, spec.head_dim) for name in "qkv")
        if layer.rope is not None:
            q, k = rotate(q, layer.rope), rotate(k, layer.rope)
        if round_kv is not None:
            k, v = round_kv(k), round_kv(v)
        planes.append((k, v))
        x = x + attend(q, k, v, layer.window, spec.attention_scale) @ of_layer("attn.o").T
        y = rms_norm(x, of_layer("mlp_norm"), spec.norm_eps)
        gate, up = y @ of_layer("mlp.gate").T, y @ of_layer("mlp.up").T
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ of_layer("mlp.down").T
    head = weight("embed.weight" if spec.tied_embeddings else "head.weight")
    return planes, rms_norm(x, weight("final_norm.weight"), spec.norm_eps) @ head.T


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
    scaling, wavelength = rope.scaling, 2 * np.pi / plain
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return plain / scaling.factor
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return plain
    smooth = scaling.original_max_positions / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def attend(q: Array, k: Array, v: Array, window: int | None, scale: float | None = None) -> Array:
    """Return causal attention `[T, heads * head_dim]`: position p sees t iff 0 <= p - t < window.

    Scores are multiplied by `scale`, which is 1 / sqrt(head_dim) when not given.
    """
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = (distance >= 0) & (distance < (window if window is not None else tokens + 1))
    out = np.empty_like(q)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T * (head_dim**-0.5 if scale is None else scale)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out.reshape(tokens, heads * head_dim)
