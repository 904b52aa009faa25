from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.decoding import Decoding
from muser_decode.engine.request import SamplingParams
from muser_decode.engine.sampling import Sampler
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint


class Alternating:
    """Allows even ids first, then odd ones, and so on; remembers what it was told."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def mask(self) -> bytes | None:
        return (b"\x55" if len(self.accepted) % 2 == 0 else b"\xaa") * 64


@pytest.fixture
def decoder(tiny_llama: Path) -> MlxDecoder:
    return MlxDecoder(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


def logits(*best: int) -> mx.array:
    """Logits of 512 tokens, the named ones far ahead, the first the furthest."""
    values = mx.zeros(512)
    for rank, token in enumerate(best):
        values[token] = 100.0 - rank
    return values


def begin(decoder: MlxDecoder, tokens: int = 3, **options: object) -> Decoding:
    return Decoding(decoder.new_cache(), Sampler(SamplingParams()), 9, tokens, **options)  # type: ignore[arg-type]


def test_the_last_prompt_token_is_fed_first_and_then_each_draw(decoder: MlxDecoder) -> None:
    decoding = begin(decoder)
    fed = []
    for best in (40, 41, 42):
        assert decoding.wants_step
        fed.append(int(decoding.feed().item()))
        assert decoding.draw(logits(best)).read() == (best, None)
    assert fed == [9, 40, 41]
    assert not decoding.wants_step


def test_a_constraint_is_told_each_draw_but_the_last(decoder: MlxDecoder) -> None:
    constraint = Alternating()
    decoding = begin(decoder, constraint=constraint)
    assert decoding.constrained
    drawn = []
    for best in ((41, 40), (42, 43), (45, 44)):
        decoding.feed()
        drawn.append(decoding.draw(logits(*best)).read()[0])
    assert drawn == [40, 43, 44]
    assert constraint.accepted == [40, 43]


def test_likelihoods_are_of_the_logits_before_the_constraint(decoder: MlxDecoder) -> None:
    decoding = begin(decoder, constraint=Alternating(), alternatives=2)
    decoding.feed()
    values = logits(41, 40)
    token, likelihood = decoding.draw(values).read()
    logprobs = values - mx.logsumexp(values)
    assert token == 40
    assert likelihood is not None
    assert likelihood.chosen == pytest.approx(float(logprobs[40].item()), abs=1e-5)
    assert [alternative for alternative, _ in likelihood.alternatives] == [41, 40]


def test_what_is_to_be_evaluated_is_the_token_and_its_evidence(decoder: MlxDecoder) -> None:
    plain, watched = begin(decoder), begin(decoder, alternatives=3)
    for decoding, arrays in ((plain, 1), (watched, 4)):
        decoding.feed()
        assert len(decoding.draw(logits(5)).arrays()) == arrays
