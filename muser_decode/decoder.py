"""The decoder in MLX: reads a model's description and weights, fills a cache, gives logits.

Everything is lazy until evaluated, and belongs to the thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields

import mlx.core as mx

from muser_decode.attention import LOG2_E, Rope, attend_blocks, attend_kernel, attend_one, query_blocks, rope_for
from muser_decode.engine.cache import KVCache
from muser_decode.errors import ModelNotSupported
from muser_decode.linear import Linear, dense, packed
from muser_decode.numerics import check_types, on_gpu, round_kv
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.spec import ModelSpec, RopeSpec

Attend = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Layer:
    """One layer's weights and what it does to positions."""

    attn_norm: mx.array
    qkv: Linear
    rope: Rope | None
    o: Linear
    mlp_norm: mx.array
    gate_up: Linear
    down: Linear


class MlxDecoder:
    """A decoder over one checkpoint.

    `packed` keeps quantised weights as they are stored where their encoding allows (least memory, fastest
    on a GPU); otherwise they become dense in `dtype` (fastest on a CPU). Of a checkpoint with tied
    embeddings one matrix serves both ends.

    Raises:
        ModelNotSupported: the model has a layer kind, or the types a combination, that this decoder lacks.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: mx.Dtype, kv_element: ElementType, packed: bool) -> None:
        check_spec(checkpoint.spec)
        check_types(dtype, kv_element)
        self.spec: ModelSpec = checkpoint.spec
        self.geometry = Geometry.of(self.spec, kv_element)
        self._dtype, self._element = dtype, kv_element
        loader = _Loader(checkpoint, dtype, packed)
        self._embed = loader.linear("embed.weight")
        self._layers = [loader.layer(index) for index in range(len(self.spec.layers))]
        self._final_norm = loader.vector("final_norm.weight")
        self._head = self._embed if self.spec.tied_embeddings else loader.linear("head.weight")
        self._on_gpu = on_gpu()
        # On the CPU, mx.compile runs a C++ compiler, which a user's machine need not have.
        self._swiglu = mx.compile(swiglu, shapeless=True) if self._on_gpu else swiglu_cpu
        self._round = mx.compile(self._round_kv, shapeless=True) if self._on_gpu else self._round_kv

    def new_cache(self) -> KVCache:
        """Return an empty cache for one generation."""
        return KVCache(self.spec, self._dtype, self._element)

    def prefill_chunk(self, ids: Sequence[int], cache: KVCache) -> None:
        """Compute keys and values of `ids` at the positions after the cache's last, and evaluate them.

        No logits, and nothing of the last layer beyond its keys and values: nobody reads it.
        """
        cache.reserve(cache.length + len(ids))
        attend = attend_kernel if self._on_gpu else self._block_attention(cache.length, len(ids))
        x = self._rows(mx.array(list(ids)))
        for index, layer in enumerate(self._layers[:-1]):
            x = self._layer(index, layer, x, cache, attend)
        self._keys_and_values(len(self._layers) - 1, self._layers[-1], x, cache)
        mx.eval(cache.arrays)
        # What a long chunk needed is of no size that decoding asks for again.
        mx.clear_cache()
        cache.commit(cache.length + len(ids))

    def step(self, token: mx.array, cache: KVCache) -> mx.array:
        """Return the logits after `token`, float32 `[vocab]`, and take it into the cache. Evaluates nothing.

        `token` holds one id, of any shape; it may itself be the unevaluated result of the step before.
        """
        cache.reserve(cache.length + 1)
        attend = attend_kernel if self._on_gpu else attend_one
        x = self._rows(token.reshape(1))
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, cache, attend)
        cache.commit(cache.length + 1)
        return self._head(self._norm(x, self._final_norm)).reshape(-1).astype(mx.float32)

    def _rows(self, ids: mx.array) -> mx.array:
        return self._embed.rows(ids).astype(self._dtype)

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.spec.norm_eps)

    def _round_kv(self, x: mx.array) -> mx.array:
        return round_kv(x, self._element)

    @staticmethod
    def _block_attention(offset: int, tokens: int) -> Attend:
        blocks = query_blocks(offset, tokens)
        return lambda q, k, v: attend_blocks(q, k, v, blocks)

    def _layer(self, index: int, layer: Layer, x: mx.array, cache: KVCache, attend: Attend) -> mx.array:
        """Return the residual stream `[tokens, hidden]` after one layer."""
        x = layer.o.added(x, attend(*self._keys_and_values(index, layer, x, cache)))
        gate, up = mx.split(layer.gate_up(self._norm(x, layer.mlp_norm)), 2, axis=-1)
        return layer.down.added(x, self._swiglu(gate, up))

    def _keys_and_values(
        self, index: int, layer: Layer, x: mx.array, cache: KVCache
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Append one layer's keys and values; return its queries `[heads, tokens, head_dim]` and all it sees."""
        heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        z = layer.qkv(self._norm(x, layer.attn_norm))
        z = z.reshape(-1, heads + 2 * kv_heads, dim).transpose(1, 0, 2)
        qk, v = z[: heads + kv_heads], z[heads + kv_heads :]
        if layer.rope is not None:
            qk = layer.rope(qk, cache.length)
        rows = self._round(mx.concatenate([qk[heads:], v]))
        return qk[:heads], *cache.append(index, rows)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up; compiled on a GPU, where it is one kernel."""
    return gate * mx.sigmoid(gate) * up


def swiglu_cpu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up by a power of two: on Linux a third of the time of the sigmoid."""
    return gate / (1.0 + mx.power(2.0, gate * -LOG2_E)) * up


def check_spec(spec: ModelSpec) -> None:
    """Check that this decoder has everything that a model has.

    Fields of a spec that have a default are additions to the plain decoder; here they must be at it.

    Raises:
        ModelNotSupported: a layer slides or rotates part of a head, or the model has an addition.
    """
    ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
    parts: tuple[ModelSpec | RopeSpec, ...] = (spec, *ropes)
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if field.default is not MISSING and value != field.default:
                raise ModelNotSupported(f"{type(part).__name__}.{field.name} is {value}: not supported")
    for index, layer in enumerate(spec.layers):
        if layer.window is not None:
            raise ModelNotSupported(f"layer {index} has a window of {layer.window}: sliding layers are not supported")
        if layer.rope is not None and layer.rope.rotary_dim != spec.head_dim:
            raise ModelNotSupported(f"layer {index} rotates {layer.rope.rotary_dim} of {spec.head_dim} components")


class _Loader:
    """Reads a checkpoint's tensors into this decoder's layouts, one layer at a time."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, keep_packed: bool) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._build = packed if keep_packed else dense
        self._ropes: dict[RopeSpec, Rope] = {}

    def linear(self, *names: str) -> Linear:
        return self._build([self._checkpoint.weight(name) for name in names], self._dtype)

    def vector(self, name: str) -> mx.array:
        return mx.array(self._checkpoint.weight(name).f32()).astype(self._dtype)

    def layer(self, index: int) -> Layer:
        at = f"layers.{index}"
        return Layer(
            attn_norm=self.vector(f"{at}.attn_norm.weight"),
            qkv=self.linear(*(f"{at}.attn.{part}.weight" for part in "qkv")),
            rope=self._rope(self._checkpoint.spec.layers[index].rope),
            o=self.linear(f"{at}.attn.o.weight"),
            mlp_norm=self.vector(f"{at}.mlp_norm.weight"),
            gate_up=self.linear(f"{at}.mlp.gate.weight", f"{at}.mlp.up.weight"),
            down=self.linear(f"{at}.mlp.down.weight"),
        )

    def _rope(self, spec: RopeSpec | None) -> Rope | None:
        if spec is None:
            return None
        if spec not in self._ropes:
            self._ropes[spec] = rope_for(spec, self._checkpoint.spec.max_positions)
        return self._ropes[spec]
