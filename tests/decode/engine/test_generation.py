from __future__ import annotations

import pytest

from muser_decode.engine.generation import Generation
from muser_decode.engine.request import Event, Failed, Finished, FinishReason, GenerationRequest
from muser_decode.engine.source import SlotPool


class Source:
    """Records what is called; `cancel` may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.error = error

    def begin(self, slots: SlotPool) -> None:
        self.calls.append("begin")

    def poll(self) -> None:
        self.calls.append("poll")

    def cancel(self) -> None:
        self.calls.append("cancel")
        if self.error is not None:
            raise self.error


def new(source: Source | None = None) -> tuple[Generation, list[Event], list[str]]:
    events: list[Event] = []
    wakes: list[str] = []
    request = GenerationRequest("r", (1, 2, 3), 4)
    return Generation(request, events.append, source, "", lambda: wakes.append("wake")), events, wakes


def test_cancel_wakes_the_engine_and_does_nothing_else() -> None:
    generation, events, wakes = new()
    assert generation.leaving is None
    generation.cancel()
    assert generation.leaving is FinishReason.CANCELLED
    assert not generation.ended
    assert (events, wakes) == ([], ["wake"])


def test_the_last_event_comes_once() -> None:
    generation, events, _ = new()
    generation.finish(FinishReason.CANCELLED)
    generation.finish(FinishReason.STOP)
    generation.fail("late")
    assert generation.ended
    assert events == [Finished(FinishReason.CANCELLED, 0, 0.0, 0.0)]


def test_a_source_that_never_began_is_cancelled() -> None:
    source = Source()
    generation, _, _ = new(source)
    generation.finish(FinishReason.CANCELLED)
    assert source.calls == ["cancel"]


def test_the_last_event_comes_even_when_the_source_fails_to_cancel() -> None:
    generation, events, _ = new(Source(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        generation.fail("shown")
    assert generation.ended
    assert events == [Failed("shown")]


def test_fill_comes_after_admit() -> None:
    generation, _, _ = new()
    with pytest.raises(RuntimeError, match="after admit"):
        generation.fill(shared=False)


def test_a_deadline_counts_from_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("muser_decode.engine.generation.time.monotonic", lambda: clock[0])
    generation = Generation(GenerationRequest("r", (1,), 4, deadline_s=2.5), [].append, None, "", lambda: None)
    endless, _, _ = new()
    clock[0] = 102.4
    assert generation.leaving is None
    clock[0] = 102.5
    assert generation.leaving is FinishReason.DEADLINE
    assert endless.leaving is None
    generation.cancel()
    assert generation.leaving is FinishReason.CANCELLED
