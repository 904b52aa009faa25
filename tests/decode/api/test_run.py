from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from muser_decode.api.answer import Answer
from muser_decode.api.errors import ApiError
from muser_decode.api.run import Run
from muser_decode.engine.request import GenerationRequest, TokenEvent
from muser_decode.errors import EngineBusy
from muser_decode.formats.conversation import Content


def run_of(kit: Any, tokens: int, answers: int = 1) -> Run:
    requests = [GenerationRequest(f"r{index}", (1,), tokens) for index in range(answers)]
    return Run(kit.backend, requests, [Answer(kit.backend.tokenizer) for _ in requests], cancel_wait_s=1.0)


async def next_of(run: Run) -> tuple[int, str]:
    """The next event's answer and text."""
    news = await run.advance()
    assert news is not None
    return news.index, "".join(delta.text for delta in news.deltas if isinstance(delta, Content))


def test_events_after_the_server_has_stopped_do_not_trouble_the_engine(kit: Any) -> None:
    kit.backend.script = lambda _request, _sink, _cancel: None

    async def start() -> Run:
        return run_of(kit, 1)

    run = asyncio.run(start())
    run._sink(0, TokenEvent(65))
    assert not run.settled


def test_events_from_another_thread_arrive_in_order(kit: Any) -> None:
    kit.backend.script = kit.saying("in order" * 50)

    async def read() -> str:
        run = run_of(kit, 400)
        text = ""
        while not run.done:
            text += (await next_of(run))[1]
        return text

    assert asyncio.run(read()) == "in order" * 50


def test_cancel_after_the_end_is_not_passed_on(kit: Any) -> None:
    async def read() -> None:
        run = run_of(kit, 9)
        while not run.done:
            await run.advance()
        run.cancel()

    asyncio.run(read())
    assert not kit.backend.cancels[0].asked.is_set()


def test_several_are_submitted_together_and_refused_together(kit: Any) -> None:
    submit_all, asked = kit.backend.submit_all, []

    def noted(parts: Any) -> Any:
        asked.append([request.request_id for request, _ in parts])
        return submit_all(parts)

    kit.backend.submit_all = noted

    async def start() -> None:
        run_of(kit, 9, answers=3)
        kit.backend.refusal = EngineBusy("full")
        with pytest.raises(ApiError) as caught:
            run_of(kit, 9, answers=2)
        assert caught.value.status == 503

    asyncio.run(start())
    assert asked == [["r0", "r1", "r2"], ["r0", "r1"]]
    assert len(kit.backend.requests) == 3


def test_what_shows_before_the_first_route_is_kept_with_its_end(kit: Any) -> None:
    def play(request: GenerationRequest, sink: Any, cancel: Any) -> None:
        if request.request_id == "r0":
            second_done.wait(10)
        kit.saying(request.request_id)(request, sink, cancel)
        if request.request_id == "r1":
            second_done.set()

    second_done = threading.Event()
    kit.backend.script = play

    async def read() -> tuple[list[str], list[int]]:
        run = run_of(kit, 9, answers=2)
        texts, ends = ["", ""], []
        while not run.settled:
            assert await run.settle(10.0)
        assert run.answers[1].ended
        while not run.done:
            news = await run.advance()
            assert news is not None
            assert news.index not in ends
            texts[news.index] += "".join(delta.text for delta in news.deltas if isinstance(delta, Content))
            ends += [news.index] if news.last else []
        return texts, ends

    assert asyncio.run(read()) == (["r0", "r1"], [1, 0])


def test_waiting_for_an_event_is_bounded(kit: Any) -> None:
    release = threading.Event()

    def play(request: GenerationRequest, sink: Any, cancel: Any) -> None:
        release.wait(10)
        kit.saying("late")(request, sink, cancel)

    kit.backend.script = play

    async def read() -> str:
        run = run_of(kit, 9)
        assert not await run.settle(0.0)
        assert await run.advance(0.01) is None
        assert run.filling is run.answers[0]
        release.set()
        text = ""
        while not run.done:
            text += (await next_of(run))[1]
        assert run.filling is None
        return text

    assert asyncio.run(read()) == "late"
