"""The MLX decoder's part of `muser model verify`: `python -m muser_decode.verify JOB OUT`."""

from __future__ import annotations

import sys
from dataclasses import replace

from muser_decode.blas import load_blas

# Before anything that imports mlx.
load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.cache import KVCache  # noqa: E402
from muser_wire.geometry import ElementType  # noqa: E402
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from muser_wire.verification import Array, Evidence, Greedy, VerifyJob, contestant  # noqa: E402


class UnroundedDecoder(MlxDecoder):
    """The decoder without the rounding of keys and values: then verification sees the arithmetic alone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False)
        self._pointwise = replace(self._pointwise, joined=lambda k, v: mx.concatenate([k, v]))

    def new_cache(self) -> KVCache:
        """Return a cache whose planes are f32."""
        return _UnroundedCache(self.spec, mx.float32, ElementType.F16)


class _UnroundedCache(KVCache):
    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of [start, stop), f32 `[tokens, kv_heads, head_dim]`."""
        rows = self._layers[layer].view(start, stop).transpose(1, 0, 2)
        return rows[:, : self._kv_heads], rows[:, self._kv_heads :]


def compute(job: VerifyJob) -> Evidence:
    """Prefill in chunks as the decode node does, then a step for each token."""
    decoder = UnroundedDecoder(open_checkpoint(job.model))
    cache = decoder.new_cache()
    for chunk in job.chunks():
        decoder.prefill_chunk(chunk, cache)

    def step(token: int) -> Array:
        return np.array(decoder.step(mx.array([token]), cache))

    logits = np.stack([step(token) for token in job.token_ids[job.logits_from :]])
    planes = tuple(_planes(decoder, cache, layer) for layer in range(len(decoder.spec.layers)))
    return Evidence(planes, logits, Greedy.choose(logits[-1], step, job.greedy_tokens))


def _planes(decoder: MlxDecoder, cache: KVCache, layer: int) -> tuple[Array, Array]:
    """Return what a layer still has of keys and values: a sliding one, what the next token sees of them."""
    window = decoder.spec.layers[layer].window
    first = 0 if window is None else max(0, cache.length - window + 1)
    k, v = (np.array(plane) for plane in cache.planes(layer, first, cache.length))
    return k, v


if __name__ == "__main__":
    sys.exit(contestant(None, compute))
