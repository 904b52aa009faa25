"""The second half of a generation: one token after the other, the device always one step ahead."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.engine.sampling import Sampler


class Decoding:
    """Yields up to `tokens` tokens after `last_prompt_id`, which is the first that a step runs.

    Each step's token stays on the device as the input of the next, which is launched before the token
    is read. So at most one step is computed in vain, when a stop token ends the generation.
    """

    def __init__(self, decoder: MlxDecoder, cache: KVCache, sampler: Sampler, last_prompt_id: int, tokens: int) -> None:
        self._decoder, self._cache, self._sampler = decoder, cache, sampler
        self._left = tokens
        self._token = self._launch(mx.array(last_prompt_id))

    def next(self) -> int:
        """Return the next token's id, after launching the step that follows it if there is to be one."""
        current = self._token
        if self._left > 0:
            self._token = self._launch(current)
        return cast(int, current.item())

    def _launch(self, token: mx.array) -> mx.array:
        drawn = self._sampler.next(self._decoder.step(token, self._cache))
        mx.async_eval(drawn)
        self._left -= 1
        return drawn
