"""The decoder in MLX: reads a model's description and weights, fills a cache, gives logits.

Everything is lazy until evaluated, and belongs to the thread that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields

import mlx.core as mx

from muser_decode.engine.cache import KVCache, cache_nbytes
from muser_decode.errors import ModelNotSupported
from muser_decode.layer import Layer, LayerLoader
from muser_decode.linear import Linear
from muser_decode.numerics import check_types
from muser_decode.pointwise import pointwise
from muser_decode.runs import ChunkRun, Run, Seen, StepRun
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import Checkpoint
from muser_wire.model.spec import LayerSpec, ModelSpec, QKNorm, RopeSpec

KNOWN = {
    ModelSpec: {
        *("qk_norm", "attention_gate", "post_norm_eps", "activation"),
        *("embedding_scale", "embedding_norm", "logit_scale", "logit_softcap"),
    },
    LayerSpec: {"window", "rope"},
    RopeSpec: {"scaling"},
    QKNorm: {"weighted", "eps"},
}
"""The additions to the plain decoder that this one computes: fields of a spec that may differ from their default."""


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
        self._pointwise = pointwise(self.spec, kv_element)
        loader = LayerLoader(checkpoint, dtype, packed)
        self._embed = loader.linear("embed.weight")
        self._layers = [loader.layer(index) for index in range(len(self.spec.layers))]
        self._final_norm = loader.vector("final_norm.weight")
        self._head = self._embed if self.spec.tied_embeddings else loader.linear("head.weight")

    def new_cache(self) -> KVCache:
        """Return an empty cache for one generation."""
        return KVCache(self.spec, self._dtype, self._element)

    def cache_nbytes(self, positions: int) -> int:
        """Return the memory, in bytes, of a cache of so many positions."""
        return cache_nbytes(self.spec, self._dtype, positions)

    def prefill_chunk(self, ids: Sequence[int], cache: KVCache, go_on: Callable[[], bool] | None = None) -> bool:
        """Compute keys and values of `ids` at the positions after the cache's last, and evaluate them.

        No logits, and nothing of the last layer beyond its keys and values: nobody reads it. `go_on` is asked
        after each layer; when it says no, at most one more layer is computed, nothing is committed and False
        comes back. A cache on which this failed or was stopped cannot be continued; what it had stays readable,
        but for rows of a window that the new ones pushed out.
        """
        run = ChunkRun(self.spec, cache, len(ids))
        x = self._rows(mx.array(list(ids)))
        before: mx.array | None = None
        for index, layer in enumerate(self._layers[:-1]):
            x = self._layer(index, layer, x, run)
            if go_on is not None:
                mx.async_eval(x)
                if before is not None:
                    mx.eval(before)
                if not go_on():
                    return False
                before = x
        self._queries(len(self._layers) - 1, self._layers[-1], x, run)
        mx.eval(cache.arrays)
        # What a long chunk needed is of no size that decoding asks for again.
        mx.clear_cache()
        run.commit()
        return True

    def step(self, token: mx.array, cache: KVCache) -> mx.array:
        """Return the logits after `token`, float32 `[vocab]`, and take it into the cache. Evaluates nothing.

        `token` holds one id, of any shape; it may itself be the unevaluated result of the step before.
        """
        return self.steps(token.reshape(1), [cache]).reshape(-1)

    def steps(self, tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
        """Return the logits after one token of each of several caches' sequences, float32 `[caches, vocab]`.

        See `step`. The matrices are read once for all; in float32 on a CPU each row is what it would be alone.
        """
        run = StepRun(self.spec, caches)
        x = self._rows(tokens)
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, run)
        run.commit()
        x = mx.fast.rms_norm(x, self._final_norm, self.spec.norm_eps)
        return self._pointwise.logits(self._head(x, apart=run.apart))

    def _rows(self, ids: mx.array) -> mx.array:
        """Return the residual stream before the first layer."""
        x = self._embed.rows(ids).astype(self._dtype)
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        return mx.fast.rms_norm(x, None, self.spec.norm_eps) if self.spec.embedding_norm else x

    def _layer(self, index: int, layer: Layer, x: mx.array, run: Run) -> mx.array:
        """Return the residual stream `[rows, hidden]` after one layer."""
        spec = self.spec
        z, q, seen = self._queries(index, layer, x, run)
        out = run.attended(index, q, seen)
        if spec.attention_gate:
            out = self._pointwise.gated(out, z[:, -spec.heads * spec.head_dim :])
        x = self._added(x, layer.o, out, layer.attn_post_norm, run)
        normed = mx.fast.rms_norm(x, layer.mlp_norm, spec.norm_eps)
        gate, up = mx.split(layer.gate_up(normed, apart=run.apart), 2, axis=-1)
        return self._added(x, layer.down, self._pointwise.activated(gate, up), layer.mlp_post_norm, run)

    def _added(self, x: mx.array, linear: Linear, y: mx.array, post_norm: mx.array | None, run: Run) -> mx.array:
        """Return the residual stream with a half layer's result, normalised where the model does that."""
        if post_norm is None or self.spec.post_norm_eps is None:
            return linear.added(x, y, apart=run.apart)
        return x + mx.fast.rms_norm(linear(y, apart=run.apart), post_norm, self.spec.post_norm_eps)

    def _queries(self, index: int, layer: Layer, x: mx.array, run: Run) -> tuple[mx.array, mx.array, Seen]:
        """Append one layer's keys and values to the caches.

        Returns all projections `[rows, out]`, the queries `[heads, rows, head_dim]`, and the keys and values
        that they see. Queries and keys are normalised and rotated together.
        """
        spec = self.spec
        z = layer.projections(mx.fast.rms_norm(x, layer.attn_norm, spec.norm_eps), apart=run.apart)
        rows = z.reshape(x.shape[0], -1, spec.head_dim).transpose(1, 0, 2)
        both = spec.heads + spec.kv_heads
        qk, v = rows[:both], rows[both : both + spec.kv_heads]
        if spec.qk_norm is not None:
            qk = mx.fast.rms_norm(qk, None, spec.qk_norm.eps)
        if layer.qk_norm is not None:
            qk = qk * layer.qk_norm
        if layer.rope is not None:
            qk = run.rotated(layer.rope, qk)
        return z, qk[: spec.heads], run.write(index, self._pointwise.joined(qk[spec.heads :], v))


def check_spec(spec: ModelSpec) -> None:
    """Check that this decoder has everything that a model has, so that no addition is passed over in silence.

    Raises:
        ModelNotSupported: a field of the spec that this decoder does not know is not at its default.
    """
    ropes = (layer.rope for layer in spec.layers)
    parts: set[ModelSpec | LayerSpec | RopeSpec | QKNorm | None] = {spec, *spec.layers, *ropes, spec.qk_norm}
    for part in parts:
        if part is None:
            continue
        known = next(names for kind, names in KNOWN.items() if isinstance(part, kind))
        for field in fields(part):
            value = getattr(part, field.name)
            if field.default is not MISSING and field.name not in known and value != field.default:
                raise ModelNotSupported(f"{type(part).__name__}.{field.name} is {value}: not supported")
