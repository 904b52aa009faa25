from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.engine.decoding import Decoding
from muser_decode.engine.request import SamplingParams
from muser_decode.engine.sampling import Sampler
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint


class Counting(MlxDecoder):
    """Counts the steps that were launched."""

    steps = 0

    def step(self, token: mx.array, cache: KVCache) -> mx.array:
        self.steps += 1
        return super().step(token, cache)


@pytest.fixture
def decoder(tiny_llama: Path) -> Counting:
    return Counting(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


def start(decoder: MlxDecoder, tokens: int) -> tuple[Decoding, KVCache]:
    cache = decoder.new_cache()
    decoder.prefill_chunk([3, 1, 4, 1, 5], cache)
    return Decoding(decoder, cache, Sampler(SamplingParams()), 9, tokens), cache


def test_each_token_is_the_argmax_after_the_one_before(decoder: Counting) -> None:
    decoding, _ = start(decoder, 6)
    tokens = [decoding.next() for _ in range(6)]
    cache = decoder.new_cache()
    decoder.prefill_chunk([3, 1, 4, 1, 5], cache)
    for fed, expected in zip([9, *tokens], tokens, strict=False):
        assert int(mx.argmax(decoder.step(mx.array(fed), cache)).item()) == expected


def test_the_device_is_one_step_ahead_and_never_further(decoder: Counting) -> None:
    decoding, cache = start(decoder, 4)
    assert decoder.steps == 1
    for launched in (2, 3, 4, 4):
        decoding.next()
        assert decoder.steps == launched
    assert cache.length == 5 + 4


def test_a_single_token_takes_a_single_step(decoder: Counting) -> None:
    decoding, _ = start(decoder, 1)
    decoding.next()
    assert decoder.steps == 1
