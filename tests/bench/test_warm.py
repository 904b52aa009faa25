from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench import conversations
from bench.conversations import COLD, Scenario
from bench.warm import SLIDING, WARM, Again, Delay, judge, report


class Words:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def replies() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        number += 1
        yield {"tokens": [1000 + number, 2000 + number], "first_s": 1.0}


@pytest.fixture
def ask() -> Any:
    made = replies()
    return lambda prompt: next(made)


def test_each_turn_of_a_chat_begins_with_the_one_before_and_its_reply(ask: Any) -> None:
    scenario = conversations.chat(Words(), ask, 50, 4)  # type: ignore[arg-type]
    assert len(scenario.prompts[0]) == 50 + conversations.USER_TOKENS
    for index, (before, after) in enumerate(zip(scenario.prompts, scenario.prompts[1:], strict=False), 1):
        assert after[: len(before) + 2] == [*before, 1000 + index, 2000 + index]
        assert len(after) == len(before) + 2 + conversations.USER_TOKENS


def test_alternating_chats_share_nothing_and_questions_share_the_document(ask: Any) -> None:
    one, two, again, _ = conversations.alternating(Words(), ask, 50, 2).prompts  # type: ignore[arg-type]
    assert one[:50] != two[:50]
    assert again[: len(one)] == one
    asked = conversations.Document(tokens=60)
    scenario = conversations.document(Words(), ask, asked)  # type: ignore[arg-type]
    assert len({tuple(prompt[:60]) for prompt in scenario.prompts}) == 1
    assert len({tuple(prompt) for prompt in scenario.prompts}) == conversations.QUESTIONS


def test_messages_grow_by_the_replies() -> None:
    tokenizer: Any = Words()
    first = conversations.messages(tokenizer, 40, 0, [])
    second = conversations.messages(tokenizer, 40, 1, ["reply"])
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2]["content"] == "reply"


def scenario(warm_s: float, tokens: list[int]) -> Scenario:
    made = Scenario("document", 1, prompts=[[1] * 10, [1] * 10])
    for name, first_s, answer in ((COLD, 1.0, [1, 2]), (WARM, warm_s, tokens)):
        made.answers[name] = [{"first_s": first_s, "tokens": answer, "cached": 8}] * 2
    return made


GOOD = Again(first_s=0.06, step_s=0.04, copy_s=0.005)


@pytest.mark.parametrize(
    ("warm_s", "tokens", "again", "delay_s", "missed"),
    [
        (0.05, [1, 2], GOOD, 0.004, ""),
        (0.09, [1, 2], GOOD, 0.004, "warm takes 9.0% of cold"),
        (0.05, [1, 3], GOOD, 0.004, "a warm answer differs"),
        (0.05, [1, 2], Again(0.07, 0.04, 0.005), 0.004, "that is 1.56 times"),
        (0.05, [1, 2], GOOD, 0.006, "saving delays tokens by 6.0 ms"),
    ],
)
def test_each_goal_can_be_missed(
    warm_s: float, tokens: list[int], again: Again, delay_s: float, missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = judge([scenario(warm_s, tokens)], again, Delay(0.0, delay_s))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missed")]
    assert (status, len(shown)) == ((1, 1) if missed else (0, 0))
    assert not missed or missed in shown[0]


def test_a_prompt_longer_than_the_window_must_be_held_too(capsys: pytest.CaptureFixture[str]) -> None:
    sliding = scenario(0.05, [1, 2])
    sliding.name = f"{SLIDING}, chat of 4 turns"
    assert judge([scenario(0.05, [1, 2]), sliding], GOOD, Delay(0.0, 0.0)) == 0
    for answer in sliding.answers[WARM]:
        answer["cached"] = 4
    assert judge([scenario(0.05, [1, 2]), sliding], GOOD, Delay(0.0, 0.0)) == 1
    assert f"missed: {SLIDING}, chat of 4 turns: 40% of the prompts was held" in capsys.readouterr().out


def test_the_report_shows_how_much_was_held(capsys: pytest.CaptureFixture[str]) -> None:
    report([scenario(0.05, [1, 2])])
    assert "80%" in capsys.readouterr().out
