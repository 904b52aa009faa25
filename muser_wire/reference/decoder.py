"""A whole model under the reference lane's rules, over any `Arithmetic`: plain, slow, and with numpy the oracle.

The nodes have faster decoders; all give the bytes of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muser_wire.model.spec import LayerSpec, ModelSpec, RopeSpec
from muser_wire.reference.arithmetic import Arithmetic, Array
from muser_wire.reference.attention import View, attention, score_scale
from muser_wire.reference.canonical import Weights
from muser_wire.reference.exp2 import activated, sigmoid, softcapped
from muser_wire.reference.linear import LinearArrays, linear, linear_arrays, quantised_input
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.planes import Integers, key_integers, plane, value_integers
from muser_wire.reference.rope import RopeTable, rope_table, rotated

Planes = tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]
"""Keys and values of one layer, `[tokens, kv_heads, head_dim]` each."""


@dataclass
class _Held:
    """What a cache holds of one layer: planes, and the integers derived from them, from position `first` on."""

    first: int
    keys: Array
    values: Array
    key_integers: Integers
    value_integers: Integers


@dataclass
class PlaneCache:
    """Planes of every layer up to position `length`. Nothing is ever dropped, whatever the windows."""

    ar: Arithmetic
    length: int = 0
    _layers: dict[int, _Held] = field(default_factory=dict)

    def append(self, layer: int, keys: Array, values: Array, first: int = 0) -> _Held:
        """Add float16 planes after those that a layer has; `first` is the position of the very first."""
        new = _Held(first, keys, values, key_integers(self.ar, keys), value_integers(self.ar, values))
        old = self._layers.get(layer)
        self._layers[layer] = new if old is None else _joined(self.ar, old, new)
        return self._layers[layer]

    def planes(self, layer: int) -> Planes:
        """Return a layer's planes on the host."""
        held = self._layers[layer]
        return self.ar.host(held.keys), self.ar.host(held.values)


def _joined(ar: Arithmetic, old: _Held, new: _Held) -> _Held:
    def join(a: Array, b: Array) -> Array:
        return ar.concatenate([a, b], 0)

    def integers(a: Integers, b: Integers) -> Integers:
        return Integers(join(a.high, b.high), join(a.low, b.low), join(a.exponents, b.exponents))

    return _Held(
        old.first,
        join(old.keys, new.keys),
        join(old.values, new.values),
        integers(old.key_integers, new.key_integers),
        integers(old.value_integers, new.value_integers),
    )


class ReferenceDecoder:
    """Computes planes and logits of a model with canonical weights."""

    def __init__(self, ar: Arithmetic, weights: Weights) -> None:
        self.ar = ar
        self.spec: ModelSpec = weights.spec
        self._weights = weights
        self._linears: dict[str, LinearArrays] = {}
        self._ropes: dict[RopeSpec, RopeTable] = {}

    def new_cache(self) -> PlaneCache:
        """Return an empty cache."""
        return PlaneCache(self.ar)

    def forward(self, ids: Sequence[int], cache: PlaneCache) -> Array:
        """Take `ids` into the cache and return the residual stream after the last layer, `[T, hidden]`."""
        x = self._embedded(ids)
        for index in range(len(self.spec.layers)):
            x = self._layer(index, x, cache)
        cache.length += len(ids)
        return x

    def logits(self, x: Array) -> npt.NDArray[np.float32]:
        """Return the logits of rows of the residual stream, `[T, vocab]`, on the host."""
        spec, ar = self.spec, self.ar
        normed = rms_norm(ar, x, self._vector("final_norm.weight"), spec.norm_eps)
        name = "embed.weight" if spec.tied_embeddings else "head.weight"
        logits = self._linear(name, normed)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = softcapped(ar, logits, spec.logit_softcap)
        return ar.host(logits)

    def _embedded(self, ids: Sequence[int]) -> Array:
        x = self.ar.array(self._weights.rows(ids))
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        return rms_norm(self.ar, x, None, self.spec.norm_eps) if self.spec.embedding_norm else x

    def _layer(self, index: int, x: Array, cache: PlaneCache) -> Array:
        spec, ar = self.spec, self.ar
        at, layer = f"layers.{index}", spec.layers[index]
        y = rms_norm(ar, x, self._vector(f"{at}.attn_norm.weight"), spec.norm_eps)
        q, k, v = self._queries_keys_values(at, layer, y, cache.length)
        held = cache.append(index, plane(ar, k), plane(ar, v))
        view = View(cache.length, held.first, layer.window, score_scale(spec.attention_scale))
        out = attention(ar, q, held.key_integers, held.value_integers, view)
        out = ar.reshape(out, (x.shape[0], spec.heads * spec.head_dim))
        if spec.attention_gate:
            out = out * sigmoid(ar, self._linear(f"{at}.attn.gate.weight", y))
        x = self._added(x, f"{at}.attn", self._linear(f"{at}.attn.o.weight", out))
        y = rms_norm(ar, x, self._vector(f"{at}.mlp_norm.weight"), spec.norm_eps)
        gate, up = (self._linear(f"{at}.mlp.{name}.weight", y) for name in ("gate", "up"))
        down = self._linear(f"{at}.mlp.down.weight", activated(ar, gate, up, spec.activation))
        return self._added(x, f"{at}.mlp", down)

    def _queries_keys_values(self, at: str, layer: LayerSpec, y: Array, start: int) -> tuple[Array, Array, Array]:
        spec, ar = self.spec, self.ar
        tokens = y.shape[0]
        q, k, v = (
            ar.reshape(self._linear(f"{at}.attn.{name}.weight", y), (tokens, -1, spec.head_dim)) for name in "qkv"
        )
        if spec.qk_norm is not None:
            weights = (
                self._vector(f"{at}.attn.{name}_norm.weight") if spec.qk_norm.weighted else None for name in "qk"
            )
            q, k = (rms_norm(ar, x, w, spec.qk_norm.eps) for x, w in zip((q, k), weights, strict=True))
        if layer.rope is not None:
            cos, sin = self._rope(layer.rope, start, start + tokens)
            q, k = rotated(ar, q, cos, sin), rotated(ar, k, cos, sin)
        return q, k, v

    def _rope(self, rope: RopeSpec, start: int, stop: int) -> tuple[Array, Array]:
        table = self._ropes.get(rope)
        if table is None or len(table.cos) < stop:
            table = self._ropes[rope] = rope_table(rope, 0, 2 * stop)
        return self.ar.array(table.cos[start:stop, None]), self.ar.array(table.sin[start:stop, None])

    def _added(self, x: Array, half: str, y: Array) -> Array:
        eps = self.spec.post_norm_eps
        x = x + (y if eps is None else rms_norm(self.ar, y, self._vector(f"{half}_post_norm.weight"), eps))
        self.ar.evaluate(x)
        return x

    def _vector(self, name: str) -> Array:
        return self.ar.array(self._weights.vector(name))

    def _linear(self, name: str, x: Array) -> Array:
        if name not in self._linears:
            self._linears[name] = linear_arrays(self.ar, self._weights.linear(name))
        return linear(self.ar, quantised_input(self.ar, x), self._linears[name])
