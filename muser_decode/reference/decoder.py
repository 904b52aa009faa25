"""The reference lane's decoder in MLX: the bytes of `muser_wire.reference.decoder`, however a prompt is cut or batched.

The same calls as the native lane's decoder. Every row is computed by operations that do not know of the others, so a
chunk's size, a batch's size and who else is in it change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from muser_decode.reference.attention import Attention
from muser_decode.reference.cache import ReferenceCache, cache_nbytes
from muser_decode.reference.layer import Layer, LayerLoader, rotated
from muser_decode.reference.linear import ActivationQuantiser, IntegerTiles, Linear, TokenRows
from muser_decode.reference.planes import Derivation, PlaneRounding, PlaneShape, Seen
from muser_decode.reference.runs import ChunkRun, Run, StepRun
from muser_decode.reference.vectors import Constant, Norm, Pointwise
from muser_wire.geometry import ElementType, Geometry
from muser_wire.reference.canonical import Weights

ELEMENT = ElementType.F16
"""Keys and values of this lane are float16, whatever a node computes them with."""


class ReferenceDecoder:
    """A decoder over weights in canonical form."""

    def __init__(self, weights: Weights) -> None:
        spec = self.spec = weights.spec
        self.geometry = Geometry.of(spec, ELEMENT)
        loader = LayerLoader(weights)
        self._head = loader.linear("embed.weight" if spec.tied_embeddings else "head.weight")
        if spec.tied_embeddings and isinstance(self._head, IntegerTiles):
            self._embedding: IntegerTiles | TokenRows = self._head
        else:
            self._embedding = TokenRows(weights, "embed.weight")
        self._layers = [loader.layer(index) for index in range(len(spec.layers))]
        self._final_norm = loader.norm("final_norm.weight", spec.norm_eps)
        self._embedding_norm = Norm(None, spec.hidden_size, spec.norm_eps) if spec.embedding_norm else None
        self._embedding_scale = None if spec.embedding_scale == 1.0 else Constant(spec.embedding_scale)
        self._quantised, self._pointwise = ActivationQuantiser(), Pointwise(spec)
        self._attention, self._rounded = Attention(spec), PlaneRounding()
        self._derived = Derivation(PlaneShape(spec.kv_heads, spec.head_dim))

    def new_cache(self) -> ReferenceCache:
        """Return an empty cache for one generation."""
        return ReferenceCache(self.spec, self._derived)

    def cache_nbytes(self, positions: int) -> int:
        """Return the memory, in bytes, of a cache of so many positions."""
        return cache_nbytes(self.spec, positions)

    def prefill_chunk(self, ids: Sequence[int], cache: ReferenceCache, go_on: Callable[[], bool] | None = None) -> bool:
        """Compute keys and values of `ids` at the positions after the cache's last, and evaluate them.

        No logits, and nothing of the last layer beyond its keys and values: nobody reads it. `go_on` is asked
        after each layer; when it says no, at most one more layer is computed, nothing is committed and False
        comes back. A cache on which this failed or was stopped cannot be continued; what it had stays readable,
        but for rows of a window that the new ones pushed out.
        """
        run = ChunkRun(cache, len(ids))
        x = self._embedded(mx.array(list(ids)))
        before: mx.array | None = None
        for index, layer in enumerate(self._layers[:-1]):
            x = self._layer(index, layer, x, run)
            # A layer of a long chunk is thousands of operations: they are started before the next ones are listed.
            mx.async_eval(x)
            if before is not None:
                mx.eval(before)
            if go_on is not None and not go_on():
                return False
            before = x
        self._projected(len(self._layers) - 1, self._layers[-1], x, run)
        mx.eval(cache.arrays)
        # What a long chunk needed is of no size that decoding asks for again.
        mx.clear_cache()
        run.commit()
        return True

    def step(self, token: mx.array, cache: ReferenceCache) -> mx.array:
        """Return the logits after `token`, float32 `[vocab]`, and take it into the cache. Evaluates nothing.

        `token` holds one id, of any shape; it may itself be the unevaluated result of the step before.
        """
        return self.steps(token.reshape(1), [cache]).reshape(-1)

    def steps(self, tokens: mx.array, caches: Sequence[ReferenceCache]) -> mx.array:
        """Return the logits after one token of each of several caches' sequences, float32 `[caches, vocab]`.

        See `step`. The matrices are read once for all; each row is what it would be alone.
        """
        run = StepRun(caches)
        x = self._embedded(tokens)
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, run)
        run.commit()
        return self._pointwise.logits(self._head(self._quantised(self._final_norm(x))))

    def _embedded(self, ids: mx.array) -> mx.array:
        """Return the residual stream before the first layer."""
        x = self._embedding.embedded(ids)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale.like(x)
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _layer(self, index: int, layer: Layer, x: mx.array, run: Run) -> mx.array:
        """Return the residual stream `[rows, hidden]` after one layer."""
        z, q, seen = self._projected(index, layer, x, run)
        out = run.attended(self._attention, layer.window, q, seen)
        if self.spec.attention_gate:
            out = out * self._pointwise.sigmoid(z[:, -self.spec.heads * self.spec.head_dim :])
        x = self._added(x, layer.o, out, layer.attn_post_norm)
        gate, up = mx.split(layer.gate_up(self._quantised(layer.mlp_norm(x))), 2, axis=-1)
        return self._added(x, layer.down, self._pointwise.activated(gate, up), layer.mlp_post_norm)

    def _added(self, x: mx.array, linear: Linear, y: mx.array, post_norm: Norm | None) -> mx.array:
        """Return the residual stream with a half layer's result, normalised where the model does that."""
        y = linear(self._quantised(y))
        return x + (y if post_norm is None else post_norm(y))

    def _projected(self, index: int, layer: Layer, x: mx.array, run: Run) -> tuple[mx.array, mx.array, list[Seen]]:
        """Append one layer's keys and values to the caches.

        Returns all projections `[rows, out]`, the quantised queries, and what each sequence's queries see. Queries and
        keys are normalised and rotated together.
        """
        spec = self.spec
        z = layer.projections(self._quantised(layer.attn_norm(x)))
        if x.shape[0] == 1:
            heads = z.reshape(-1, 1, spec.head_dim)
        else:
            heads = z.reshape(x.shape[0], -1, spec.head_dim).swapaxes(0, 1)
        both = spec.heads + spec.kv_heads
        qk, v = heads[:both], heads[both : both + spec.kv_heads]
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        if layer.rope is not None:
            qk = rotated(qk, run.table(layer.rope))
        planes = self._rounded(mx.concatenate([qk[spec.heads :], v]))
        rows, q = self._derived.rows_and_queries(planes, qk[: spec.heads])
        return z, q, run.write(index, rows)
