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


class Alternating:
    """Allows even ids first, then odd ones, and so on; remembers what it was told."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def mask(self) -> bytes | None:
        return (b"\x55" if len(self.accepted) % 2 == 0 else b"\xaa") * 64


def constrained(decoder: MlxDecoder, tokens: int, constraint: Alternating) -> Decoding:
    cache = decoder.new_cache()
    decoder.prefill_chunk([3, 1, 4, 1, 5], cache)
    return Decoding(decoder, cache, Sampler(SamplingParams()), 9, tokens, alternatives=3, constraint=constraint)


def test_a_constraint_sees_each_token_before_the_next_is_drawn(decoder: Counting) -> None:
    constraint = Alternating()
    decoding = constrained(decoder, 6, constraint)
    tokens = [decoding.next() for _ in range(6)]
    assert [token % 2 for token in tokens] == [0, 1, 0, 1, 0, 1]
    assert constraint.accepted == tokens[:5]
    assert decoder.steps == 6


def test_likelihoods_belong_to_the_token_that_was_returned(decoder: Counting) -> None:
    decoding = constrained(decoder, 4, Alternating())
    cache = decoder.new_cache()
    decoder.prefill_chunk([3, 1, 4, 1, 5], cache)
    fed = 9
    for _ in range(4):
        logits = decoder.step(mx.array(fed), cache)
        fed = decoding.next()
        logprobs = logits - mx.logsumexp(logits)
        assert decoding.likelihood is not None
        assert decoding.likelihood.chosen == pytest.approx(float(logprobs[fed].item()), abs=1e-4)
        best = decoding.likelihood.alternatives[0]
        assert best[0] == int(mx.argmax(logits).item())
        assert len(decoding.likelihood.alternatives) == 3
