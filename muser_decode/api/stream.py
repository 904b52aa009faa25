"""A streamed answer: server-sent events that begin at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from muser_decode.api.disconnect import unless_gone
from muser_decode.api.errors import ApiError, internal, log_failure
from muser_decode.api.limits import Limits
from muser_decode.api.run import News, Run
from muser_decode.api.shapes import route_headers
from muser_decode.formats.conversation import Delta

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Writes one stream in the shape of one endpoint."""

    @property
    def id(self) -> str:
        """The answer's name, for logs."""

    @property
    def wants_progress(self) -> bool:
        """Whether the client asked for the prefill's progress in events."""

    def opening(self, run: Run) -> Iterator[bytes]:
        """Yield what comes first."""

    def progress(self, run: Run) -> Iterator[bytes]:
        """Yield a sign of life during a prefill."""

    def deltas(self, run: Run, index: int, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield what an event showed of one answer."""

    def ended(self, run: Run, index: int) -> Iterator[bytes]:
        """Yield the end of one answer."""

    def closing(self, run: Run) -> Iterator[bytes]:
        """Yield what comes last."""

    def failed(self, error: ApiError) -> bytes:
        """Return the event of a failure after the start."""


class EventStream(Response):
    """Starts generations when it is sent, and streams them.

    Headers and the opening go out at once. `limits.header_wait_s`, which nobody notices, is for prompts that are
    ready at once: their route is named by `x-muser-route`, and what refuses or ends them within it is an ordinary
    error answer. Every other failure is an event with the endpoint's error object; then the stream ends. The last
    chunk carries the `muser` object, and with it the route, in any case. Until all routes are known there is a sign of
    life whenever nothing else was said for a while.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        start: Callable[[], Run],
        writer: Writer,
        limits: Limits,
        refuse: Callable[[ApiError], Response] = ApiError.response,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._start, self._writer, self._refuse = start, writer, refuse
        self._header_wait_s = 0.0 if writer.wants_progress else limits.header_wait_s
        self._pause_s = limits.progress_every_s if writer.wants_progress else limits.comment_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that goes away cancels the generations."""
        try:
            await unless_gone(receive, self._serve(scope, receive, send))
        except ClientDisconnect:
            log.info("client_gone id=%s", self._writer.id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            run = self._start()
        except ApiError as error:
            await self._refuse(error)(scope, receive, send)
            return
        try:
            await self._wait_for_route(run)
            await self._send(run, send)
        except ApiError as error:
            await self._refuse(error)(scope, receive, send)
        finally:
            run.cancel()

    async def _wait_for_route(self, run: Run) -> None:
        """Read events for a moment, or until the first answer's route is known."""
        until_s = _now() + self._header_wait_s
        while not run.settled and await run.settle(until_s - _now()):
            pass

    async def _send(self, run: Run, send: Send) -> None:
        for name, value in route_headers(run.answers[0]).items():
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
            yield self._writer.failed(error)
        # The outermost loop of a stream that has begun.
        except Exception as error:
            log_failure(error)
            yield self._writer.failed(internal())

    async def _answer(self, run: Run) -> AsyncIterator[bytes]:
        writer = self._writer
        for piece in writer.opening(run):
            yield piece
        spoke_s, waiting = _now(), set(range(len(run.answers)))
        while not run.done:
            news = await run.advance(None if run.filling is None else spoke_s + self._pause_s - _now())
            for piece in writer.progress(run) if news is None else self._told(run, news, waiting):
                spoke_s = _now()
                yield piece
        run.log_answers()
        for index in sorted(waiting):
            for piece in writer.ended(run, index):
                yield piece
        for piece in writer.closing(run):
            yield piece

    def _told(self, run: Run, news: News, waiting: set[int]) -> Iterator[bytes]:
        """Yield what an event showed, and the end of its answer where others go on; `waiting` have not ended."""
        yield from self._writer.deltas(run, news.index, news.deltas)
        if news.last and not run.done:
            waiting.discard(news.index)
            yield from self._writer.ended(run, news.index)


def _now() -> float:
    return asyncio.get_running_loop().time()
