from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.engine.request import SamplingParams
from muser_decode.engine.sampling import Evidence, Sampler, allowed_tokens, sample

LOGITS = np.log(np.array([0.05, 0.40, 0.10, 0.25, 0.15, 0.05]))
"""A distribution whose order is not that of its ids."""

DRAWS = 2_000


def draws(params: SamplingParams, logits: np.ndarray = LOGITS, count: int = DRAWS) -> np.ndarray:
    row = mx.array(logits.astype(np.float32))
    keys = mx.random.split(mx.random.key(7), count)
    return np.array(mx.stack([sample(row, params, keys[i]) for i in range(count)]))


def frequencies(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """The support is exact, and Pearson's statistic is below its 99.9 % point for up to 5 degrees of freedom (20.5)."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert set(np.flatnonzero(counts)) == set(np.flatnonzero(probabilities))
    expected = probabilities * len(tokens)
    seen = expected > 0
    assert ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() < 20.5


def filtered(keep: list[int], probabilities: np.ndarray | None = None) -> np.ndarray:
    p = np.exp(LOGITS) if probabilities is None else probabilities
    kept = np.where(np.isin(np.arange(len(p)), keep), p, 0.0)
    return kept / kept.sum()


def test_plain_sampling_follows_the_distribution() -> None:
    assert_drawn_from(draws(SamplingParams(temperature=1.0)), np.exp(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_logits(temperature: float) -> None:
    p = np.exp(LOGITS / temperature)
    assert_drawn_from(draws(SamplingParams(temperature=temperature)), p / p.sum())


def test_top_k_keeps_the_k_likeliest() -> None:
    assert_drawn_from(draws(SamplingParams(temperature=1.0, top_k=3)), filtered([1, 3, 4]))


def test_top_k_of_the_whole_vocabulary_or_more_keeps_all() -> None:
    for top_k in (6, 600):
        assert_drawn_from(draws(SamplingParams(temperature=1.0, top_k=top_k), count=500), np.exp(LOGITS))


def test_top_p_keeps_the_shortest_head_that_reaches_it() -> None:
    # 0.40 + 0.25 is below 0.7, so the third likeliest stays as well.
    assert_drawn_from(draws(SamplingParams(temperature=1.0, top_p=0.7)), filtered([1, 3, 4]))
    assert_drawn_from(draws(SamplingParams(temperature=1.0, top_p=0.6)), filtered([1, 3]))


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.39])
def test_top_p_always_leaves_the_likeliest(top_p: float) -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_p=top_p), count=50)) == {1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    # 0.3 * 0.40 = 0.12 lies between 0.10 and 0.15.
    assert_drawn_from(draws(SamplingParams(temperature=1.0, min_p=0.3)), filtered([1, 3, 4]))


def test_min_p_of_one_leaves_the_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=1.0, min_p=1.0), count=50)) == {1}


def test_filters_act_after_temperature() -> None:
    # At temperature 0.5 the likeliest holds 0.59: top-p 0.55 leaves one. At temperature 1 it leaves two.
    assert set(draws(SamplingParams(temperature=0.5, top_p=0.55), count=100)) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.55), count=100)) == {1, 3}


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of the three that top-k leaves, the first two hold 0.65 / 0.80 = 0.81: enough for top-p 0.78, not without top-k.
    assert_drawn_from(draws(SamplingParams(temperature=1.0, top_k=3, top_p=0.78)), filtered([1, 3]))
    assert 2 not in draws(SamplingParams(temperature=1.0, top_p=0.78), count=200)
    assert 4 in draws(SamplingParams(temperature=1.0, top_p=0.78), count=200)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = np.array([-50.0, 20.0, 80.0, 79.0])
    assert set(draws(SamplingParams(temperature=1e-30), logits, count=50)) == {2}


def tokens_of(sampler: Sampler, steps: int) -> list[int]:
    random = np.random.default_rng(3)
    return [int(sampler.next(mx.array(random.standard_normal(50).astype(np.float32))).item()) for _ in range(steps)]


def test_greedy_takes_the_largest() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, seed=1))
    assert int(sampler.next(mx.array([0.0, 3.0, -1.0, 2.9])).item()) == 1


def test_a_seed_gives_the_same_tokens_whoever_else_draws() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42)
    alone = tokens_of(Sampler(params), 20)
    ours, other = Sampler(params), Sampler(SamplingParams(temperature=1.0, seed=5))
    random = np.random.default_rng(3)
    together = []
    for _ in range(20):
        logits = mx.array(random.standard_normal(50).astype(np.float32))
        together.append(int(ours.next(logits).item()))
        other.next(logits).item()
        mx.random.uniform().item()
    assert together == alone


def test_seeds_differ_and_large_or_negative_ones_work() -> None:
    runs = {tuple(tokens_of(Sampler(SamplingParams(temperature=1.0, seed=seed)), 12)) for seed in (0, 1, -1, 2**70 + 5)}
    assert len(runs) == 4


def test_no_seed_means_another_text_each_time() -> None:
    params = SamplingParams(temperature=1.0)
    assert tokens_of(Sampler(params), 12) != tokens_of(Sampler(params), 12)


def test_steps_of_one_request_differ() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    row = mx.zeros((1000,))
    assert len({int(sampler.next(row).item()) for _ in range(8)}) > 1


def greedy(params: SamplingParams, logits: list[float], steps: int, prompt_ids: list[int] | None = None) -> list[int]:
    """Tokens of `steps` greedy draws from the same logits."""
    sampler = Sampler(params, prompt_ids or [])
    return [int(sampler.next(mx.array(logits)).item()) for _ in range(steps)]


def test_a_presence_penalty_is_taken_once_from_every_generated_token() -> None:
    # 5.0 falls to 3.5 and 4.0 to 2.5; then the first leads again, and stays so however often it comes.
    assert greedy(SamplingParams(presence_penalty=1.5), [5.0, 4.0, 0.0], 5) == [0, 1, 0, 0, 0]


def test_a_frequency_penalty_grows_with_each_repetition() -> None:
    # 5.0, 3.5, 2.0 and so on against 4.0, 2.5, 1.0.
    assert greedy(SamplingParams(frequency_penalty=1.5), [5.0, 4.0, 0.0], 5) == [0, 1, 0, 1, 0]


def test_negative_penalties_favour_repetition() -> None:
    assert greedy(SamplingParams(frequency_penalty=-2.0), [5.0, 5.5, 0.0], 4) == [1, 1, 1, 1]


def test_presence_and_frequency_do_not_look_at_the_prompt() -> None:
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert greedy(params, [5.0, 4.0], 1, prompt_ids=[0, 0, 0]) == [0]


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    # In the prompt: 5.0 becomes 2.5.
    assert greedy(params, [5.0, 4.0, 3.0], 3, prompt_ids=[0]) == [1, 2, 0]
    # -1.0 becomes -2.0, below -1.5.
    assert greedy(params, [-1.0, -1.5, -9.0], 3) == [0, 1, 0]


def test_penalties_follow_the_tokens_that_were_drawn() -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=2.0, presence_penalty=1.0, seed=4)
    plain = SamplingParams(temperature=1.0, seed=4)
    sampler, oracle = Sampler(params), Sampler(plain)
    random = np.random.default_rng(1)
    counts = np.zeros(8, np.float32)
    for _ in range(30):
        logits = random.standard_normal(8).astype(np.float32)
        expected = int(oracle.next(mx.array(logits - 2.0 * counts - 1.0 * (counts > 0))).item())
        assert int(sampler.next(mx.array(logits)).item()) == expected
        counts[expected] += 1


def test_a_bias_moves_and_bans_tokens() -> None:
    logits = [1.0, 3.0, 2.0]
    assert greedy(SamplingParams(logit_bias=((2, 1.5),)), logits, 1) == [2]
    banned = SamplingParams(temperature=1.0, logit_bias=((1, -100.0), (0, -100.0)), seed=1)
    assert greedy(banned, logits, 20) == [2] * 20


def test_a_mask_leaves_what_it_allows() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    allowed = allowed_tokens(bytes([0b0000_0101]), 10)
    assert {int(sampler.next(mx.zeros(10), allowed).item()) for _ in range(40)} == {0, 2}
    # Bits beyond the vocabulary, and a vocabulary beyond the bits.
    assert np.array(allowed_tokens(b"\xff\xff", 9)).tolist() == [True] * 9
    assert np.array(allowed_tokens(b"\x01", 12)).tolist() == [True] + [False] * 11


def test_likelihoods_are_the_model_s_own() -> None:
    row = mx.array(LOGITS.astype(np.float32) + 3.0)
    told = Evidence.of(row, mx.array(4), 2).read()
    assert told.chosen == pytest.approx(np.log(0.15), abs=1e-5)
    assert [token for token, _ in told.alternatives] == [1, 3]
    assert [value for _, value in told.alternatives] == pytest.approx(np.log([0.40, 0.25]), abs=1e-5)
    assert Evidence.of(row, mx.array(0), 0).read().alternatives == ()
    assert len(Evidence.of(row, mx.array(0), 50).read().alternatives) == 6
