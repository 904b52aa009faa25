from __future__ import annotations

import asyncio
from typing import Any

from muser_decode.api.answer import Answer
from muser_decode.api.run import Run
from muser_decode.engine.request import GenerationRequest, TokenEvent


def test_events_after_the_server_has_stopped_do_not_trouble_the_engine(kit: Any) -> None:
    kit.backend.script = lambda _request, _sink, _cancel: None

    async def start() -> Run:
        request = GenerationRequest("r", (1,), 1)
        return Run(kit.backend, request, Answer(kit.backend.tokenizer, []), cancel_wait_s=1.0)

    run = asyncio.run(start())
    run._sink(TokenEvent(65))
    assert not run.answer.settled


def test_events_from_another_thread_arrive_in_order(kit: Any) -> None:
    kit.backend.script = kit.saying("in order" * 50)

    async def read() -> str:
        request = GenerationRequest("r", (1,), 400)
        run = Run(kit.backend, request, Answer(kit.backend.tokenizer, []), cancel_wait_s=1.0)
        return "".join([await run.advance() async for _ in until_done(run)])

    async def until_done(run: Run) -> Any:
        while not run.done:
            yield None

    assert asyncio.run(read()) == "in order" * 50


def test_cancel_after_the_end_is_not_passed_on(kit: Any) -> None:
    async def read() -> None:
        run = Run(kit.backend, GenerationRequest("r", (1,), 9), Answer(kit.backend.tokenizer, []), cancel_wait_s=1.0)
        while not run.done:
            await run.advance()
        run.cancel()

    asyncio.run(read())
    assert not kit.backend.cancels[0].asked.is_set()
