"""The reference lane's decoder by compiled kernels, on a CPU: the same calls and bytes as the one in MLX operations.

Whatever a call returns is computed when it returns: its input is read first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from muser_decode.reference.compiled.cache import CompiledCache, Seen, cache_nbytes
from muser_decode.reference.compiled.layer import Layer, LayerLoader, Matrix, Norm, Rope
from muser_decode.reference.decoder import ELEMENT
from muser_wire.geometry import Geometry
from muser_wire.reference.attention import View, score_scale
from muser_wire.reference.canonical import Weights
from muser_wire.reference.compiled.operations import Activations, Floats, Operations, Planes
from muser_wire.reference.exp2 import softcapped
from muser_wire.reference.norm import rms_norm
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.rope import RopeTable

NUMPY = NumpyArithmetic()


@dataclass(frozen=True)
class Part:
    """Some rows of a run: the next `tokens` tokens of one cache's sequence, which are rows from `first`."""

    cache: CompiledCache
    first: int
    tokens: int

    @property
    def start(self) -> int:
        """The first one's position."""
        return self.cache.length


class Run:
    """One run through the layers: the next tokens of one sequence, or one token of each of several."""

    def __init__(self, caches: Sequence[CompiledCache], tokens: int) -> None:
        self.parts = [Part(cache, row * tokens, tokens) for row, cache in enumerate(caches)]
        for part in self.parts:
            part.cache.reserve(part.start + tokens)
        first = self.parts[0].start
        several = len(caches) > 1
        self._positions = [part.start for part in self.parts] if several else range(first, first + tokens)
        self._tables: dict[Rope, RopeTable] = {}

    def table(self, rope: Rope | None) -> RopeTable | None:
        """Return a table's rows for the run's positions."""
        if rope is None:
            return None
        if rope not in self._tables:
            self._tables[rope] = rope.at(self._positions)
        return self._tables[rope]

    def commit(self) -> None:
        """Declare the rows complete in every layer."""
        for part in self.parts:
            part.cache.commit(part.start + part.tokens)


class CompiledDecoder:
    """A decoder over weights in canonical form; see `muser_decode.reference.decoder.ReferenceDecoder`."""

    def __init__(self, weights: Weights, operations: Operations) -> None:
        spec = self.spec = weights.spec
        self.geometry = Geometry.of(spec, ELEMENT)
        self._weights, self._operations = weights, operations
        loader = LayerLoader(weights, operations)
        self._head = loader.matrix("embed.weight" if spec.tied_embeddings else "head.weight")
        self._layers = [loader.layer(index) for index in range(len(spec.layers))]
        self._final_norm = loader.norm("final_norm.weight", spec.norm_eps)
        self._scale = score_scale(spec.attention_scale)

    def new_cache(self) -> CompiledCache:
        """Return an empty cache for one generation."""
        return CompiledCache(self.spec, self._operations)

    def cache_nbytes(self, positions: int) -> int:
        """Return the memory, in bytes, of a cache of so many positions."""
        return cache_nbytes(self.spec, positions)

    def prefill_chunk(self, ids: Sequence[int], cache: CompiledCache, go_on: Callable[[], bool] | None = None) -> bool:
        """Compute keys and values of `ids` at the positions after the cache's last.

        As `ReferenceDecoder.prefill_chunk`, without its delay: no layer is computed after `go_on` says no.
        """
        run, x = Run([cache], len(ids)), self._embedded(ids)
        for index, layer in enumerate(self._layers[:-1]):
            x = self._layer(index, layer, x, run)
            if go_on is not None and not go_on():
                return False
        self._projected(len(self._layers) - 1, self._layers[-1], x, run)
        run.commit()
        return True

    def step(self, token: mx.array, cache: CompiledCache) -> mx.array:
        """Return the logits after `token`, one id of any shape, float32 `[vocab]`, and take it into the cache."""
        return self.steps(token.reshape(1), [cache]).reshape(-1)

    def steps(self, tokens: mx.array, caches: Sequence[CompiledCache]) -> mx.array:
        """Return the logits after one token of each of several caches' sequences, float32 `[caches, vocab]`.

        The matrices are read once for all; each row is what it would be alone.
        """
        run, x = Run(caches, 1), self._embedded(np.array(tokens).tolist())
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, run)
        run.commit()
        return mx.array(self._logits(x))

    def _embedded(self, ids: Sequence[int]) -> Floats:
        """Return the residual stream before the first layer."""
        x = self._weights.rows(ids)
        if self.spec.embedding_scale != 1.0:
            x = x * np.float32(self.spec.embedding_scale)
        if self.spec.embedding_norm:
            x = rms_norm(NUMPY, x, None, self.spec.norm_eps)
        return np.ascontiguousarray(x)

    def _logits(self, x: Floats) -> Floats:
        """Return the logits of the residual stream after the last layer."""
        norm = self._final_norm
        logits = self._operations.product(self._operations.normed(x, norm.weight, norm.eps), self._head)
        if self.spec.logit_scale != 1.0:
            logits = logits * np.float32(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits if cap is None else softcapped(NUMPY, logits, cap)

    def _layer(self, index: int, layer: Layer, x: Floats, run: Run) -> Floats:
        """Return the residual stream `[rows, hidden]` after one layer."""
        operations, spec = self._operations, self.spec
        z, seen = self._projected(index, layer, x, run)
        q = operations.turned(self._heads(z)[:, : spec.heads], layer.query_norm, run.table(layer.rope))
        out = self._attended(layer.window, q, seen, run)
        if spec.attention_gate:
            rows = operations.gated(out, z[:, -spec.heads * spec.head_dim :])
        else:
            rows = operations.quantised(out)
        x = self._added(x, rows, layer.o, layer.attn_post_norm)
        norm = layer.mlp_norm
        gate_up = operations.product(operations.normed(x, norm.weight, norm.eps), layer.gate_up)
        return self._added(x, operations.activated(gate_up, spec.activation), layer.down, layer.mlp_post_norm)

    def _added(self, x: Floats, rows: Activations, matrix: Matrix, norm: Norm | None) -> Floats:
        """Return the residual stream with a half layer's result, normalised where the model does that."""
        if norm is None:
            return self._operations.product(rows, matrix, x)
        return self._operations.added(x, self._operations.product(rows, matrix), norm.weight, norm.eps)

    def _projected(self, index: int, layer: Layer, x: Floats, run: Run) -> tuple[Floats, list[Seen]]:
        """Append one layer's keys and values to the caches.

        Returns all projections `[rows, out]`, and what each sequence's queries see.
        """
        operations, spec, norm = self._operations, self.spec, layer.attn_norm
        z = operations.product(operations.normed(x, norm.weight, norm.eps), layer.projections)
        heads, both = self._heads(z), spec.heads + spec.kv_heads
        keys = operations.plane(heads[:, spec.heads : both], layer.key_norm, run.table(layer.rope))
        values = operations.plane(heads[:, both : both + spec.kv_heads], None, None)
        seen = []
        for part in run.parts:
            rows = slice(part.first, part.first + part.tokens)
            seen.append(part.cache.append(index, Planes(keys[rows], values[rows])))
        return z, seen

    def _attended(self, window: int | None, q: Floats, seen: Sequence[Seen], run: Run) -> Floats:
        """Return attention `[rows, heads * head_dim]`."""
        outputs = []
        for part, held in zip(run.parts, seen, strict=True):
            view = View(part.start, held.first, window, self._scale)
            own = q[part.first : part.first + part.tokens]
            outputs.append(self._operations.attended(own, held.rows, view))
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs)

    def _heads(self, z: Floats) -> Floats:
        return z.reshape(len(z), -1, self.spec.head_dim)
