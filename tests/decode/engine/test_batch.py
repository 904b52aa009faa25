from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.batch import Batch
from muser_decode.engine.cache import KVCache
from muser_decode.engine.decoding import Decoding
from muser_decode.engine.request import Likelihood, SamplingParams, TokenConstraint
from muser_decode.engine.sampling import Sampler
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import load_tokenizer

WINDOW = 24
NEW = 40
"""Enough for sliding layers to forget, and for rows to move within their arrays' slack of 128."""


class Counting(MlxDecoder):
    """Counts the steps that were launched, and remembers how many rows each had."""

    rows: list[int]

    def steps(self, tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
        self.rows = [*getattr(self, "rows", []), len(caches)]
        return super().steps(tokens, caches)


def new_decoder(path: Path) -> Counting:
    decoder = Counting(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    decoder.rows = []
    return decoder


@pytest.fixture
def decoder(tiny_llama: Path) -> Counting:
    return new_decoder(tiny_llama)


class Evens:
    """Allows even ids only; remembers how many steps were launched when it was asked and told."""

    def __init__(self, decoder: Counting) -> None:
        self._decoder = decoder
        self.asked: list[int] = []
        self.told: list[int] = []

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0
        self.told.append(len(self._decoder.rows))

    def mask(self) -> bytes | None:
        self.asked.append(len(self._decoder.rows))
        return b"\x55" * 64


def place(
    decoder: MlxDecoder,
    prompt: Sequence[int],
    new: int = NEW,
    sampling: SamplingParams | None = None,
    constraint: TokenConstraint | None = None,
) -> Decoding:
    cache = decoder.new_cache()
    if len(prompt) > 1:
        decoder.prefill_chunk(prompt[:-1], cache)
    params = sampling or SamplingParams()
    return Decoding(
        cache, Sampler(params, prompt), prompt[-1], new, alternatives=params.logprobs, constraint=constraint
    )


Answer = list[tuple[int, Likelihood | None]]


def run(batch: Batch, answers: dict[Decoding, Answer], turns: int = 1_000) -> None:
    """Advance until each has all its tokens, or so many times."""
    for _ in range(turns):
        for outcome in batch.advance():
            assert outcome.error is None
            answers.setdefault(outcome.decoding, []).append((outcome.token, outcome.likelihood))
        if answers and not any(row.wants_step for row in batch.rows):
            for outcome in batch.settle():
                answers.setdefault(outcome.decoding, []).append((outcome.token, outcome.likelihood))
            return


def alone(decoder: MlxDecoder, prompt: Sequence[int], sampling: SamplingParams, new: int = NEW) -> Answer:
    batch, row = Batch(decoder), place(decoder, prompt, new, sampling)
    batch.join(row)
    answers: dict[Decoding, Answer] = {}
    run(batch, answers)
    assert len(answers[row]) == new
    return answers[row]


def test_each_token_is_the_argmax_after_the_one_before(decoder: Counting) -> None:
    tokens = [token for token, _ in alone(decoder, [3, 1, 4, 1, 5, 9], SamplingParams())]
    cache = decoder.new_cache()
    decoder.prefill_chunk([3, 1, 4, 1, 5], cache)
    for fed, expected in zip([9, *tokens], tokens, strict=False):
        assert int(mx.argmax(decoder.step(mx.array(fed), cache)).item()) == expected
    assert len(tokens) == NEW


def test_the_device_is_one_step_ahead_and_never_further(decoder: Counting) -> None:
    batch, row = Batch(decoder), place(decoder, [3, 1, 4, 1, 5, 9], new=4)
    batch.join(row)
    assert batch.advance() == []
    for launched in (2, 3, 4, 4):
        assert len(batch.advance()) == 1
        assert len(decoder.rows) == launched
    assert row.cache.length == 5 + 4
    assert batch.advance() == []


def test_a_first_token_is_to_be_read_before_the_next_launch(decoder: Counting) -> None:
    batch, first, second = Batch(decoder), place(decoder, [3, 1, 4]), place(decoder, [5])
    batch.join(first)
    assert not batch.begins
    batch.advance()
    assert batch.begins
    assert [outcome.decoding for outcome in batch.settle()] == [first]
    batch.advance()
    assert not batch.begins
    batch.join(second)
    batch.advance()
    assert batch.begins
    batch.leave(second)
    assert not batch.begins


def test_others_join_and_leave_without_a_step_of_their_own(decoder: Counting) -> None:
    batch = Batch(decoder)
    first, second = place(decoder, [3, 1, 4]), place(decoder, [5])
    batch.join(first)
    batch.advance()
    batch.join(second)
    assert [outcome.decoding for outcome in batch.advance()] == [first]
    assert [outcome.decoding for outcome in batch.advance()] == [first, second]
    batch.leave(first)
    batch.leave(first)
    # What is launched for one that left is never read, and it is in no step any more.
    assert [outcome.decoding for outcome in batch.advance()] == [second]
    assert decoder.rows == [1, 2, 2, 1]
    assert batch.clear() == [second]
    assert (batch.rows, batch.advance()) == ((), [])


def test_settling_reads_what_is_launched_and_launches_nothing(decoder: Counting) -> None:
    batch = Batch(decoder)
    batch.join(place(decoder, [3, 1, 4]))
    assert batch.settle() == []
    batch.advance()
    (settled,) = batch.settle()
    assert batch.settle() == []
    assert batch.advance() == []
    (after,) = batch.advance()
    expected = [token for token, _ in alone(decoder, [3, 1, 4], SamplingParams())]
    assert [settled.token, after.token] == expected[:2]


def test_a_constraint_learns_a_token_while_the_next_step_runs(decoder: Counting) -> None:
    """Its grammar works after the launch of the step that its mask is for, so the device and the others go on."""
    constraint = Evens(decoder)
    batch = Batch(decoder)
    free, held = place(decoder, [3, 1, 4]), place(decoder, [2, 7, 1], constraint=constraint)
    batch.join(free)
    batch.join(held)
    answers: dict[Decoding, Answer] = {}
    run(batch, answers)
    assert answers[free] == alone(decoder, [3, 1, 4], SamplingParams())
    assert len(answers[held]) == NEW
    assert constraint.asked == list(range(1, NEW + 1))
    assert constraint.told == list(range(2, NEW + 1))


def test_an_error_in_one_draw_is_that_one_s(decoder: Counting) -> None:
    class Failing(Evens):
        def mask(self) -> bytes | None:
            if len(self.told) == 2:
                raise ValueError("a grammar's fault")
            return super().mask()

    batch = Batch(decoder)
    good, bad = place(decoder, [3, 1, 4]), place(decoder, [2, 7, 1], constraint=Failing(decoder))
    batch.join(bad)
    batch.join(good)
    tokens: list[int] = []
    errors = []
    while len(tokens) < NEW:
        for outcome in batch.advance():
            if outcome.error is not None:
                errors.append(outcome.error)
                batch.leave(outcome.decoding)
            elif outcome.decoding is good:
                tokens.append(outcome.token)
    assert [str(error) for error in errors] == ["a grammar's fault"]
    assert tokens == [token for token, _ in alone(decoder, [3, 1, 4], SamplingParams())]


SAMPLINGS = [
    SamplingParams(logprobs=2),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.02, seed=5, logprobs=0),
    SamplingParams(presence_penalty=1.0, logit_bias=((7, 3.0), (8, -3.0)), logprobs=5),
]


def check_company(decoder: Counting, prompts: Sequence[Sequence[int]], new: int = NEW) -> None:
    """Five answers alone, and the same five in one batch that they join at different times."""
    expected = [alone(decoder, prompt, sampling, new) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
    batch, rows = Batch(decoder), []
    answers: dict[Decoding, Answer] = {}
    for prompt, sampling in zip(prompts, SAMPLINGS, strict=True):
        rows.append(place(decoder, prompt, new, sampling))
        batch.join(rows[-1])
        run(batch, answers, turns=2)
    run(batch, answers)
    assert max(decoder.rows) == 5
    # Tokens and likelihoods, to the last bit: each row's sums have one order, whoever else is in the batch.
    assert [answers[row] for row in rows] == expected
    assert len({token for token, _ in expected[0]}) > 2


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen3", "gemma3", "muse_glimmer"])
def test_company_changes_nothing_in_any_family(tmp_path: Path, family: str) -> None:
    write_tiny(family, tmp_path / family, layers=7, window=WINDOW)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(10, 500, tokens).tolist() for tokens in (1, 9, WINDOW, WINDOW + 1, 5 * WINDOW)]
    check_company(new_decoder(tmp_path / family), prompts)


def test_company_changes_nothing_in_a_real_model(smollm2: Path) -> None:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(100, 40_000, tokens).tolist() for tokens in (2, 17, 40)]
    chat = load_tokenizer(smollm2).encode("The lighthouse keeper wrote to his sister every winter, and she")
    check_company(new_decoder(smollm2), [chat, *prompts, chat[:5]], new=10)
