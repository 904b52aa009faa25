from __future__ import annotations

import pytest

from muser_decode.standing import LINK_LIFETIME_S, MAX_STEPS, STEP_TOKENS, Standing, prompt_steps

PROMPT = list(range(5, 5 + 3 * STEP_TOKENS))


def test_a_producer_that_keeps_failing_is_left_alone_longer_and_longer() -> None:
    standing = Standing(first_rest_s=1.0)
    assert standing.resting_s(0.0) == 0.0
    rests = []
    now_s = 0.0
    for _ in range(6):
        standing.failed(now_s)
        rests.append(standing.resting_s(now_s))
        now_s += rests[-1]
        assert standing.resting_s(now_s) == 0.0
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_whole_handoff_ends_the_rest_and_forgets_the_failures() -> None:
    standing = Standing()
    for _ in range(4):
        standing.failed(0.0)
    standing.completed(None, 1.0)
    assert standing.resting_s(1.0) == 0.0
    standing.failed(2.0)
    assert standing.resting_s(2.0) == 1.0


def test_prompts_are_known_as_far_as_they_begin_alike() -> None:
    standing = Standing()
    standing.met(b"first")
    standing.remember(PROMPT)
    assert standing.seen_tokens(prompt_steps(PROMPT)) == 3 * STEP_TOKENS
    assert standing.seen_tokens(prompt_steps([*PROMPT, 7, 8, 9])) == 3 * STEP_TOKENS
    assert (
        standing.seen_tokens(prompt_steps([*PROMPT[: 2 * STEP_TOKENS], 9, *PROMPT[2 * STEP_TOKENS + 1 :]]))
        == 2 * STEP_TOKENS
    )
    assert standing.seen_tokens(prompt_steps([9, *PROMPT[1:]])) == 0
    # The same step elsewhere is another one: what comes before it counts.
    assert standing.seen_tokens(prompt_steps(PROMPT[STEP_TOKENS:])) == 0


def test_a_restarted_producer_holds_nothing_and_gets_a_new_chance() -> None:
    standing = Standing()
    standing.met(b"first")
    standing.remember(PROMPT)
    standing.failed(0.0)
    standing.met(b"first")
    assert (standing.seen_tokens(prompt_steps(PROMPT)), standing.resting_s(0.0)) == (3 * STEP_TOKENS, 1.0)
    standing.met(b"second")
    assert (standing.seen_tokens(prompt_steps(PROMPT)), standing.resting_s(0.0)) == (0, 0.0)


def test_the_fastest_handoff_of_late_is_the_link_s_rate() -> None:
    standing = Standing()
    assert standing.link_nbytes_per_s(0.0) is None
    standing.completed(1e9, 0.0)
    standing.completed(2e8, 1.0)
    standing.completed(None, 2.0)
    assert standing.link_nbytes_per_s(3.0) == 1e9
    assert standing.link_nbytes_per_s(LINK_LIFETIME_S) is None
    standing.completed(2e8, LINK_LIFETIME_S)
    assert standing.link_nbytes_per_s(LINK_LIFETIME_S + 1) == 2e8


def test_work_that_the_producer_has_not_told_of_is_counted_until_it_ends() -> None:
    standing = Standing()
    first, second = standing.opened(1000, 5.0), standing.opened(300, 7.0)
    assert [standing.tokens_since(asked_s) for asked_s in (4.0, 6.0, 8.0)] == [1300, 300, 0]
    standing.ended(first)
    assert standing.tokens_since(4.0) == 300
    standing.ended(second)
    standing.ended(second)
    assert standing.tokens_since(4.0) == 0


@pytest.mark.parametrize("prompts", [MAX_STEPS // 2])
def test_what_is_remembered_is_bounded_and_the_latest_stays(prompts: int) -> None:
    standing = Standing()
    for index in range(prompts):
        standing.remember([index] * 3 * STEP_TOKENS)
    assert len(standing._steps) == MAX_STEPS
    assert standing.seen_tokens(prompt_steps([prompts - 1] * 3 * STEP_TOKENS)) == 3 * STEP_TOKENS
    assert standing.seen_tokens(prompt_steps([0] * 3 * STEP_TOKENS)) == 0
