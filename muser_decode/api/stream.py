"""A streamed answer: server-sent events whose headers name the route when it is known in time."""

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
from muser_decode.api.run import Run
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

    Headers wait for the route, at most `limits.header_wait_s`; a failure before them is an ordinary
    error answer. Where they go first, `x-muser-route` is absent, comments tell the progress of the
    prefill, and the route stands only in the last chunk, which carries the `muser` object in any case.
    A client that wants progress in events gets headers at once. A failure after the headers is an event
    with the endpoint's error object; then the stream ends.
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
            await _settles(run, self._header_wait_s)
            await self._send(run, send)
        except ApiError as error:
            await self._refuse(error)(scope, receive, send)
        finally:
            run.cancel()

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
        async for piece in self._prefill(run):
            yield piece
        waiting = set(range(len(run.answers)))
        while not run.done:
            index, deltas = await run.advance()
            for piece in writer.deltas(run, index, deltas):
                yield piece
            if run.answers[index].complete and not run.done:
                for piece in self._ends(run, waiting & {index}):
                    yield piece
                waiting.discard(index)
        run.log_answers()
        for piece in self._ends(run, waiting):
            yield piece
        for piece in writer.closing(run):
            yield piece

    async def _prefill(self, run: Run) -> AsyncIterator[bytes]:
        """Yield signs of life until the route is known."""
        while not await _settles(run, self._pause_s):
            for piece in self._writer.progress(run):
                yield piece

    def _ends(self, run: Run, indexes: set[int]) -> Iterator[bytes]:
        """Yield the ends of these answers."""
        for index in sorted(indexes):
            yield from self._writer.ended(run, index)


async def _settles(run: Run, wait_s: float) -> bool:
    """Read events until the route is known; return whether it became known in time."""
    try:
        async with asyncio.timeout(wait_s):
            while not run.settled:
                await run.settle()
    except TimeoutError:
        return False
    return True
