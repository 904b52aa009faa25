"""One generation seen from the event loop: the engine's events arrive on its thread and are read here."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from muser_decode.api.answer import Answer
from muser_decode.api.backend import ChatBackend
from muser_decode.api.errors import ApiError, from_engine
from muser_decode.engine.request import Event, FinishReason, GenerationRequest
from muser_decode.errors import EngineBusy, EngineStopped, RequestInvalid

log = logging.getLogger(__name__)


class Run:
    """Submits a request and pumps its events into an `Answer`. Made and used on the event loop.

    Events wait in a queue without a bound of its own: the request's token limit bounds their number.

    Raises:
        ApiError: the engine did not take the request.
    """

    def __init__(self, backend: ChatBackend, request: GenerationRequest, answer: Answer, cancel_wait_s: float) -> None:
        self.answer = answer
        self.request = request
        self._cancel_wait_s = cancel_wait_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        try:
            self._generation = backend.submit(request, self._sink)
        except (EngineBusy, EngineStopped, RequestInvalid) as error:
            raise from_engine(error) from error

    def _sink(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The event loop is closed: the server has stopped and nobody reads this answer any more.
            log.debug("event_dropped id=%s", self.request.request_id)

    async def advance(self) -> str:
        """Wait for one event; return the text that it releases.

        Raises:
            ApiError: the generation failed, or the node cancelled it.
        """
        answer = self.answer
        text = answer.feed(await self._events.get())
        if answer.failed is not None:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "generation_failed", answer.failed.message)
        if answer.stopped:
            await self._close()
        elif answer.finished is not None and answer.finished.reason is FinishReason.CANCELLED:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "cancelled", "The server stopped this generation.")
        return text

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.answer.ended or self.answer.stopped

    def cancel(self) -> None:
        """Stop the engine's work, unless it has ended."""
        if not self.answer.ended:
            self._generation.cancel()

    def log_answer(self) -> None:
        """Log how a complete answer came to be."""
        account = self.answer.account() or {}
        log.info(
            "answered id=%s route=%s reason=%r prompt_tokens=%d tokens=%d finish=%s handoff=%s",
            self.request.request_id,
            account.get("route"),
            account.get("reason"),
            len(self.request.prompt_ids),
            self.answer.tokens,
            self.answer.finish_reason(),
            account.get("handoff_id"),
        )

    async def _close(self) -> None:
        """End a generation that a stop string completed, and wait a little for the engine's closing figures."""
        self.cancel()
        try:
            async with asyncio.timeout(self._cancel_wait_s):
                while not self.answer.ended:
                    self.answer.feed(await self._events.get())
        except TimeoutError:
            log.warning("cancel_slow id=%s", self.request.request_id)
