"""From logits to the next token, on the device and without waiting for it.

The order is that of the common samplers: temperature, then top-k, then top-p over what is left, then
min-p relative to the likeliest. Each request has its own key, split once a token, so its text depends
on its seed and its logits alone, whoever else is being served.
"""

from __future__ import annotations

import math
import os

import mlx.core as mx

from muser_decode.engine.request import SamplingParams

SEED_NBYTES = 8


class Sampler:
    """Draws the tokens of one generation."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        seed = int.from_bytes(os.urandom(SEED_NBYTES), "little") if params.seed is None else params.seed
        self._key = mx.random.key(seed % (1 << 8 * SEED_NBYTES))

    def next(self, logits: mx.array) -> mx.array:
        """Return the next token, an unevaluated scalar, from logits `[vocab]`."""
        if self._params.temperature == 0.0:
            return mx.argmax(logits)
        self._key, key = mx.random.split(self._key)
        return sample(logits, self._params, key)


def sample(logits: mx.array, params: SamplingParams, key: mx.array) -> mx.array:
    """Return one draw, a scalar, from logits `[vocab]` at a temperature above 0, with the filters that are on."""
    # The largest becomes 0 first, so that a tiny temperature cannot overflow.
    x = (logits - mx.max(logits)) / params.temperature
    ids: mx.array | None = None
    if 0 < params.top_k < x.size:
        ids = mx.argpartition(-x, kth=params.top_k - 1)[: params.top_k]
        x = x[ids]
    if params.top_p < 1.0:
        order = mx.argsort(-x)
        x = within_top_p(x[order], params.top_p)
        ids = order if ids is None else ids[order]
    if params.min_p > 0.0:
        x = mx.where(x >= mx.max(x) + math.log(params.min_p), x, -mx.inf)
    drawn = mx.random.categorical(x, key=key)
    return drawn if ids is None else ids[drawn]


def within_top_p(descending: mx.array, top_p: float) -> mx.array:
    """Return sorted logits with -inf from the first whose predecessors already hold `top_p`; the first of all stays."""
    probabilities = mx.softmax(descending, precise=True)
    before = mx.cumsum(probabilities, inclusive=False)
    kept = (before < top_p) | (mx.arange(descending.size) == 0)
    return mx.where(kept, descending, -mx.inf)
