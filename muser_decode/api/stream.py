"""A streamed answer: server-sent events whose headers name the route when it is known in time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from muser_decode.api.disconnect import unless_gone
from muser_decode.api.errors import ApiError, internal, log_failure
from muser_decode.api.limits import Limits
from muser_decode.api.run import Run
from muser_decode.api.shapes import Head, chunk, route_headers, usage_chunk

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Starts a generation when it is sent, and streams it.

    Headers wait for the route, at most `limits.header_wait_s`; a failure before them is an ordinary
    error answer. Where they go first, `x-muser-route` is absent, comments tell the progress of the
    prefill, and the route stands only in the last chunk, which carries the `muser` object in any case.
    A failure after the headers is an event with OpenAI's error object; then the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, start: Callable[[], Run], head: Head, *, include_usage: bool, limits: Limits) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._start = start
        self._head = head
        self._include_usage = include_usage
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that goes away cancels the generation."""
        try:
            await unless_gone(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            log.info("client_gone id=%s", self._head.id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            run = self._start()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await _settles(run, self._limits.header_wait_s)
            await self._send(run, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            run.cancel()

    async def _send(self, run: Run, send: Send) -> None:
        for name, value in route_headers(run.answer).items():
            self.headers[name] = value
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces(run):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, run: Run) -> AsyncIterator[bytes]:
        """Yield the body, which ends in an event whatever happens."""
        try:
            async for piece in self._answer(run):
                yield piece
        except ApiError as error:
            yield _event(error.body())
        # The outermost loop of a stream that has begun.
        except Exception as error:
            log_failure(error)
            yield _event(internal().body())

    async def _answer(self, run: Run) -> AsyncIterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})
        while not await _settles(run, self._limits.comment_every_s):
            yield _progress_comment(run)
        while not run.done:
            text = await run.advance()
            if text:
                yield self._chunk({"content": text})
        run.log_answer()
        yield _event({**chunk(self._head, {}, run.answer.finish_reason()), "muser": run.answer.account()})
        if self._include_usage:
            yield _event(usage_chunk(self._head, run.answer, len(run.request.prompt_ids)))
        yield DONE

    def _chunk(self, delta: dict[str, object]) -> bytes:
        return _event(chunk(self._head, delta))


async def _settles(run: Run, wait_s: float) -> bool:
    """Read events until the route is known; return whether it became known in time."""
    try:
        async with asyncio.timeout(wait_s):
            while not run.answer.settled:
                await run.advance()
    except TimeoutError:
        return False
    return True


def _progress_comment(run: Run) -> bytes:
    progress = run.answer.progress
    return f": prefilling {progress.done}/{progress.total}\n\n".encode() if progress else b": waiting\n\n"


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
