"""The second half of a generation: one token after the other, the device always one step ahead."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.engine.request import Likelihood, TokenConstraint
from muser_decode.engine.sampling import Evidence, Sampler, allowed_tokens


class Decoding:
    """Yields up to `tokens` tokens after `last_prompt_id`, which is the first that a step runs.

    Each step's token stays on the device as the input of the next, which is launched before the token
    is read. So at most one step is computed in vain, when a stop token ends the generation. Under a
    `constraint` the next step's logits are launched first and its draw after the token was read: the
    grammar works while the device does.

    `alternatives` is how many likely tokens are reported beside each; None reports no likelihood.
    """

    def __init__(
        self,
        decoder: MlxDecoder,
        cache: KVCache,
        sampler: Sampler,
        last_prompt_id: int,
        tokens: int,
        *,
        alternatives: int | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self._decoder, self._cache, self._sampler = decoder, cache, sampler
        self._left = tokens
        self._alternatives, self._constraint = alternatives, constraint
        self.likelihood: Likelihood | None = None
        """Of the token that `next` returned last."""
        self._token, self._evidence = self._draw(self._step(mx.array(last_prompt_id)))

    def next(self) -> int:
        """Return the next token's id, after launching the step that follows it if there is to be one."""
        current, evidence = self._token, self._evidence
        if self._left > 0:
            logits = self._step(current)
            if self._constraint is not None:
                mx.async_eval(logits)
                self._constraint.accept(cast(int, current.item()))
            self._token, self._evidence = self._draw(logits)
        self.likelihood = None if evidence is None else evidence.read()
        return cast(int, current.item())

    def _step(self, token: mx.array) -> mx.array:
        self._left -= 1
        return self._decoder.step(token, self._cache)

    def _draw(self, logits: mx.array) -> tuple[mx.array, Evidence | None]:
        mask = None if self._constraint is None else self._constraint.mask()
        token = self._sampler.next(logits, None if mask is None else allowed_tokens(mask, logits.size))
        evidence = None if self._alternatives is None else Evidence.of(logits, token, self._alternatives)
        mx.async_eval(token, *(() if evidence is None else evidence.arrays()))
        return token, evidence
