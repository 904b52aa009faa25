"""From logits to the next token, on the device and without waiting for it.

The order is that of the common samplers: bias, penalties, a grammar's mask, temperature, then top-k, then
top-p over what is left, then min-p relative to the likeliest. Each request has its own key, split once a
token, so its text depends on its seed and its logits alone, whoever else is being served.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from muser_decode.engine.request import Likelihood, SamplingParams

SEED_NBYTES = 8


class Sampler:
    """Draws the tokens of one generation that continues `prompt_ids`."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._params = params
        seed = int.from_bytes(os.urandom(SEED_NBYTES), "little") if params.seed is None else params.seed
        self._key = mx.random.key(seed % (1 << 8 * SEED_NBYTES))
        self._bias: mx.array | None = None
        self._penalties = Penalties(params, prompt_ids) if Penalties.wanted(params) else None

    def next(self, logits: mx.array, allowed: mx.array | None = None) -> mx.array:
        """Return the next token, an unevaluated scalar, from logits `[vocab]`; `allowed` is a boolean `[vocab]`."""
        if self._params.logit_bias:
            logits = logits + self._bias_of(logits.size)
        if self._penalties is not None:
            logits = self._penalties.apply(logits)
        if allowed is not None:
            logits = mx.where(allowed, logits, -mx.inf)
        token = self._draw(logits)
        if self._penalties is not None:
            self._penalties.count(token)
        return token

    def _draw(self, logits: mx.array) -> mx.array:
        if self._params.temperature == 0.0:
            return mx.argmax(logits)
        self._key, key = mx.random.split(self._key)
        return sample(logits, self._params, key)

    def _bias_of(self, vocab: int) -> mx.array:
        if self._bias is None:
            dense = np.zeros(vocab, np.float32)
            for token_id, bias in self._params.logit_bias:
                dense[token_id] += bias
            self._bias = mx.array(dense)
        return self._bias


class Penalties:
    """Counts of the tokens so far, on the device, and what they take off the logits.

    The token that a step drew is counted without being read, so the device is never waited for.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = prompt_ids
        self._counts: mx.array | None = None
        self._in_prompt: mx.array | None = None

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Say whether these parameters penalise anything."""
        return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0

    def apply(self, logits: mx.array) -> mx.array:
        """Return logits `[vocab]` less the penalties of the tokens so far.

        A repeated token's logit is divided by the repetition penalty where positive, multiplied where negative.
        """
        params = self._params
        counts, in_prompt = self._state(logits.size)
        if params.repetition_penalty != 1.0:
            repeated = in_prompt | (counts > 0)
            scaled = mx.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits = mx.where(repeated, scaled, logits)
        return logits - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty

    def count(self, token: mx.array) -> None:
        """Take note of a drawn token, an unevaluated scalar."""
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)

    def _state(self, vocab: int) -> tuple[mx.array, mx.array]:
        if self._counts is None or self._in_prompt is None:
            seen = np.zeros(vocab, np.bool_)
            seen[list(self._prompt_ids)] = True
            self._counts, self._in_prompt = mx.zeros(vocab), mx.array(seen)
        return self._counts, self._in_prompt


@dataclass(frozen=True)
class Evidence:
    """What a `Likelihood` is read from, on the device: scalars and `[alternatives]`."""

    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    @classmethod
    def of(cls, logits: mx.array, token: mx.array, alternatives: int) -> Evidence:
        """Return the unevaluated evidence for `token` in the model's own logits `[vocab]`."""
        logprobs = logits - mx.logsumexp(logits)
        if alternatives == 0:
            return cls(logprobs[token], mx.zeros(0, mx.uint32), mx.zeros(0))
        count = min(alternatives, logits.size)
        ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
        ids = ids[mx.argsort(-logprobs[ids])]
        return cls(logprobs[token], ids, logprobs[ids])

    def arrays(self) -> tuple[mx.array, ...]:
        """Return what is to be evaluated."""
        return self.chosen, self.top_ids, self.top

    def read(self) -> Likelihood:
        """Return the figures; waits for the device."""
        pairs = zip(cast("list[int]", self.top_ids.tolist()), cast("list[float]", self.top.tolist()), strict=True)
        return Likelihood(cast(float, self.chosen.item()), tuple(pairs))


def allowed_tokens(mask: bytes, vocab: int) -> mx.array:
    """Return a grammar's bits, lowest first, as booleans `[vocab]`; ids beyond the bits are not allowed."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab].astype(np.bool_)
    return mx.array(np.pad(bits, (0, vocab - bits.size)))


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
