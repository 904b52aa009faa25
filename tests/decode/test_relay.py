"""Handoffs one after another: what is asked next, and what the engine is told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from muser_decode.engine.source import SlotPool, SourceDone, SourceFailed, StagedChunk, StagingSlot
from muser_decode.producers import Handoff
from muser_decode.relay import RelaySource
from muser_decode.router import Plan

IDS = tuple(range(301))
"""300 tokens to bring."""

SLOT = StagingSlot(0, memoryview(bytearray(4)))
POOL = SlotPool([], lambda: None)


def chunk(start: int, stop: int) -> StagedChunk:
    return StagedChunk(start, stop, SLOT, ())


def failed(reason: str, code: str = "transport", segments: int = 0) -> SourceFailed:
    return SourceFailed(reason, 0.5, segments, segments * 100, "aa", code)


def done(segments: int, reused: int = 0) -> SourceDone:
    return SourceDone(1.0, segments, segments * 100, "bb", reused)


@dataclass
class Script:
    """A source that says what it is told to."""

    news: deque[Any] = field(default_factory=deque)
    begun: SlotPool | None = None
    cancelled: int = 0

    def begin(self, slots: SlotPool) -> None:
        self.begun = slots

    def poll(self) -> Any:
        return self.news.popleft() if self.news else None

    def cancel(self) -> None:
        self.cancelled += 1


class Choices:
    """Stands for `Producers`: `others` are given out in order, then `declined`."""

    def __init__(self, *others: Handoff, declined: Plan | None = None, configured: int = 3) -> None:
        self._others, self._declined, self._configured = deque(others), declined, configured
        self.asked: list[tuple[int, frozenset[str]]] = []

    def __len__(self) -> int:
        return self._configured

    def choose(self, ids: object, held_tokens: int, tried: frozenset[str]) -> Handoff | Plan:
        assert ids == IDS
        self.asked.append((held_tokens, tried))
        return self._others.popleft() if self._others else self._declined or Plan(None)


def handoff(name: str, *news: object) -> Handoff:
    return Handoff(Script(deque(news)), Plan(name, predicted_s=1.0))  # type: ignore[arg-type]


def relayed(choices: Choices, first: Handoff, held: int = 0) -> tuple[RelaySource, list[Any]]:
    """Poll a relay to its end, or until it says nothing twice in a row; return it and its news."""
    relay = RelaySource(choices, IDS, held, first)  # type: ignore[arg-type]
    relay.begin(POOL)
    news: list[Any] = []
    silent = 0
    while silent < 2 and not isinstance(news[-1] if news else None, SourceDone | SourceFailed):
        item = relay.poll()
        silent = silent + 1 if item is None else 0
        news += [item] if item is not None else []
    return relay, news


def test_one_whole_handoff_passes_through_and_its_plan_stays() -> None:
    first = handoff("a", chunk(0, 200), chunk(200, 300), done(2, reused=64))
    relay, news = relayed(Choices(), first)
    assert news == [chunk(0, 200), chunk(200, 300), SourceDone(1.0, 2, 200, "bb", 64, "")]
    assert (relay.code, relay.plan) == ("", first.plan)


def test_another_producer_goes_on_after_the_last_chunk_and_the_first_failure_stays_known() -> None:
    second = handoff("b", chunk(200, 300), done(1))
    choices = Choices(second)
    relay, news = relayed(choices, handoff("a", chunk(0, 100), chunk(100, 200), failed("gone", segments=2)))
    assert choices.asked == [(200, frozenset({"a"}))]
    assert second.source.begun is POOL  # type: ignore[attr-defined]
    assert news[:-1] == [chunk(0, 100), chunk(100, 200), chunk(200, 300)]
    assert news[-1] == SourceDone(1.5, 3, 300, "bb", 0, "a: gone")
    assert (relay.code, relay.plan) == ("transport", None)


def test_tokens_that_the_second_producer_had_count_only_where_it_brought_them() -> None:
    # It had 250 of the prompt; 200 of them came from the first producer, and 40 were held before.
    choices = Choices(handoff("b", chunk(200, 300), done(1, reused=250)))
    _, news = relayed(choices, handoff("a", chunk(40, 200), failed("gone")), held=40)
    assert news[-1].reused_tokens == 40 + 50
    assert news[-1].broken == "a: gone"


def test_a_producer_that_failed_before_its_first_chunk_leaves_no_trace_in_the_route() -> None:
    relay, news = relayed(Choices(handoff("b", chunk(0, 300), done(3))), handoff("a", failed("busy", "refused_busy")))
    assert (news[-1].broken, relay.code) == ("", "")
    assert relay.plan is None


def test_the_way_ends_here_when_nobody_is_faster() -> None:
    declined = Plan(None, "faster_here", "predicted 0.1 s here, 2.0 s by producer b")
    relay, news = relayed(Choices(declined=declined), handoff("a", chunk(0, 100), failed("gone", segments=1)))
    assert news[-1] == SourceFailed(
        "a: gone; predicted 0.1 s here, 2.0 s by producer b", 0.5, 1, 100, "aa", "transport"
    )
    assert relay.code == "transport"


def test_every_producer_is_tried_once() -> None:
    choices = Choices(
        handoff("b", chunk(100, 200), failed("stalled", "no_progress")), handoff("c", failed("late")), configured=3
    )
    relay, news = relayed(choices, handoff("a", chunk(0, 100), failed("gone")))
    assert choices.asked == [(100, frozenset({"a"})), (200, frozenset({"a", "b"}))]
    assert news[-1].reason == "a: gone; b: stalled; c: late"
    assert relay.code == "transport"


def test_a_sole_producer_s_reason_stands_alone() -> None:
    choices = Choices(configured=1)
    _, news = relayed(choices, handoff("a", chunk(0, 100), failed("transport: gone")))
    assert news[-1].reason == "transport: gone"
    assert choices.asked == []


def test_a_cache_that_lacks_only_the_seal_is_asked_of_nobody() -> None:
    choices = Choices(handoff("b"))
    _, news = relayed(choices, handoff("a", chunk(0, 300), failed("gone")))
    assert isinstance(news[-1], SourceFailed)
    assert choices.asked == []


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_cancel_reaches_the_handoff_under_way(handed_over: bool) -> None:
    second = handoff("b")
    first = handoff("a", *([failed("gone")] if handed_over else []))
    relay, _ = relayed(Choices(second), first)
    relay.cancel()
    assert [first.source.cancelled, second.source.cancelled] == ([0, 1] if handed_over else [1, 0])  # type: ignore[attr-defined]
