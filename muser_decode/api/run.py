"""The generations of one request seen from the event loop: events arrive on the engine's thread and are read here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from muser_decode.api.account import account
from muser_decode.api.answer import Answer
from muser_decode.api.backend import Cancellable, ChatBackend
from muser_decode.api.errors import ApiError, deadline_exceeded, from_engine
from muser_decode.engine.request import Event, FinishReason, GenerationRequest, PrefillProgress
from muser_decode.errors import EngineBusy, EngineStopped, RequestInvalid
from muser_decode.formats.conversation import Delta

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """What one event shows of answer `index`. `last`: nothing more of it will be shown."""

    index: int
    deltas: Sequence[Delta]
    last: bool


class Run:
    """Submits requests and pumps their events into their answers. Made and used on the event loop.

    Events wait in a queue without a bound of its own: the requests' token limits bound their number.

    Raises:
        ApiError: the engine did not take them; it takes all or none.
    """

    def __init__(
        self,
        backend: ChatBackend,
        requests: Sequence[GenerationRequest],
        answers: Sequence[Answer],
        cancel_wait_s: float,
    ) -> None:
        self.requests, self.answers = requests, answers
        self._cancel_wait_s = cancel_wait_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._early: deque[News] = deque()
        parts = [(request, partial(self._sink, index)) for index, request in enumerate(requests)]
        try:
            self._generations: Sequence[Cancellable] = backend.submit_all(parts)
        except (EngineBusy, EngineStopped, RequestInvalid) as error:
            raise from_engine(error) from error

    def _sink(self, index: int, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
        except RuntimeError:
            # The event loop is closed: the server has stopped and nobody reads this answer any more.
            log.debug("event_dropped id=%s", self.requests[index].request_id)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, which all answers share."""
        return len(self.requests[0].prompt_ids)

    async def settle(self, wait_s: float) -> bool:
        """Wait for one event and keep what it shows for `advance`; return False when none came within `wait_s` seconds.

        Raises:
            ApiError: a generation failed, or the node cancelled it.
        """
        news = await self._next(wait_s)
        if news is not None and (news.deltas or news.last):
            self._early.append(news)
        return news is not None

    async def advance(self, wait_s: float | None = None) -> News | None:
        """Return what the next event shows; None when none came within `wait_s` seconds.

        Raises:
            ApiError: a generation failed, or the node cancelled it.
        """
        return self._early.popleft() if self._early else await self._next(wait_s)

    async def _next(self, wait_s: float | None) -> News | None:
        try:
            # Only the wait is bounded: an event that was taken is read to its end.
            async with asyncio.timeout(wait_s):
                index, event = await self._events.get()
        except TimeoutError:
            return None
        return await self._read(index, event)

    async def _read(self, index: int, event: Event) -> News:
        answer = self.answers[index]
        was_complete = answer.complete
        deltas = answer.feed(event)
        if was_complete:
            return News(index, (), last=False)
        if answer.failed is not None:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "generation_failed", answer.failed.message)
        if answer.stopped and not answer.ended:
            self._generations[index].cancel()
        elif answer.finished is not None and answer.finished.reason is FinishReason.CANCELLED:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "cancelled", "The server stopped this generation.")
        elif answer.late:
            raise deadline_exceeded()
        if self._complete:
            await self._close()
        return News(index, deltas, last=answer.complete)

    async def drain(self, take: Callable[[int, Sequence[Delta]], None]) -> None:
        """Give `take` what each event shows, to the end of every answer. The engine's work ends with this call.

        Raises:
            ApiError: a generation failed, or the node cancelled it.
        """
        try:
            while not self.done:
                news = await self.advance()
                if news is not None:
                    take(news.index, news.deltas)
        finally:
            self.cancel()
        self.log_answers()

    @property
    def settled(self) -> bool:
        """Whether the first answer's route is known, or will never be."""
        return self.answers[0].settled

    @property
    def filling(self) -> Answer | None:
        """The first answer whose route is not known yet: its prompt waits or is prefilled. None: there is no such."""
        return next((answer for answer in self.answers if not answer.settled), None)

    @property
    def progress(self) -> PrefillProgress | None:
        """How far that answer's prompt is, if anything is known of it."""
        return None if self.filling is None else self.filling.progress

    @property
    def done(self) -> bool:
        """Whether every answer is complete and was read."""
        return self._complete and not self._early

    @property
    def _complete(self) -> bool:
        return all(answer.complete for answer in self.answers)

    def cancel(self) -> None:
        """Stop the engine's work, where it has not ended."""
        for generation, answer in zip(self._generations, self.answers, strict=True):
            if not answer.ended:
                generation.cancel()

    def log_answers(self) -> None:
        """Log how complete answers came to be."""
        for request, answer in zip(self.requests, self.answers, strict=True):
            figures = account(answer) or {}
            log.info(
                "answered id=%s route=%s reason=%r prompt_tokens=%d tokens=%d finish=%s handoff=%s",
                request.request_id,
                figures.get("route"),
                figures.get("reason"),
                len(request.prompt_ids),
                answer.tokens,
                answer.finish_reason(),
                figures.get("handoff_id"),
            )

    async def _close(self) -> None:
        """Wait a little for the closing figures of generations that this side ended."""
        try:
            async with asyncio.timeout(self._cancel_wait_s):
                while not all(answer.ended for answer in self.answers):
                    index, event = await self._events.get()
                    self.answers[index].feed(event)
        except TimeoutError:
            log.warning("cancel_slow id=%s", self.requests[0].request_id)
