"""One request on its way through the engine: first its cache is filled, then it takes part in the batch.

Filling goes in units: install one staged chunk, or prefill some tokens here. Whatever a request needs, others
wait for a unit at most.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from muser_decode.engine.decoding import Decoding
from muser_decode.engine.prefilling import Prefilling, Workshop
from muser_decode.engine.recording import Recorder
from muser_decode.engine.request import (
    Event,
    EventSink,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Likelihood,
    TokenEvent,
)
from muser_decode.engine.sampling import Sampler
from muser_decode.engine.source import KVSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What a generation is given with its admission: memory for `first_tokens` of its answer.

    `more_tokens`, told how many it has had, says for how many more there is memory. `beat` is called after each
    layer of its prompt that is computed.
    """

    first_tokens: int
    more_tokens: Callable[[int], int]
    beat: Callable[[], None]


class Generation:
    """The state of one request. `cancel` may be called from any thread; all else belongs to the engine's.

    `wake` tells the engine that there is something to do; `reason` says why there is no source, if
    there is none.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: EventSink,
        source: KVSource | None,
        reason: str,
        wake: Callable[[], None],
    ) -> None:
        self.request = request
        self._sink, self._source, self._reason, self._wake = sink, source, reason, wake
        self._cancelled = threading.Event()
        self._submitted_s = time.monotonic()
        self._prefilling: Prefilling | None = None
        self._ids: list[int] = []
        self._recorder: Recorder | None = None
        self._generated = 0
        self._first_token_s = 0.0
        self._decode_began_s = 0.0
        self.decoding: Decoding | None = None
        """Its place in the batch, once its cache is full."""
        self.ended = False

    def cancel(self) -> None:
        """Ask for the end. It comes, as a Finished event, before another step or another layer but one is begun."""
        self._cancelled.set()
        self._wake()

    @property
    def deadline_s(self) -> float:
        """When it ends at the latest, as monotonic time."""
        limit_s = self.request.deadline_s
        return math.inf if limit_s is None else self._submitted_s + limit_s

    @property
    def leaving(self) -> FinishReason | None:
        """Why it is to end now, if it is."""
        if self._cancelled.is_set():
            return FinishReason.CANCELLED
        return FinishReason.DEADLINE if time.monotonic() >= self.deadline_s else None

    @property
    def computes(self) -> bool:
        """Whether its next unit is computed here and takes long."""
        return self._prefilling is not None and self._prefilling.computes

    def admit(self, workshop: Workshop, room: Room) -> None:
        """Begin: take a cache, and start the handoff if there is a source."""
        self._workshop, self._room = workshop, room
        source, self._source = self._source, None

        def go_on() -> bool:
            room.beat()
            return self.leaving is None

        self._prefilling = Prefilling(workshop, self.request, self._sink, source, self._reason, go_on=go_on)

    def fill(self, *, shared: bool) -> bool:
        """Do one unit of an admitted generation; with the last one its `decoding` begins.

        `shared` says that others get tokens meanwhile. Returns False when it waits for its source.
        """
        if self._prefilling is None:
            raise RuntimeError("fill comes after admit")
        progressed = self._prefilling.complete or self._prefilling.advance(shared=shared)
        if self._prefilling.complete and self.leaving is None:
            self._begin_decode(self._prefilling)
        return progressed

    def _begin_decode(self, prefilling: Prefilling) -> None:
        report = prefilling.report()
        self._ids, self._recorder = prefilling.ids, prefilling.recorder()
        self._sink(report)
        self._decode_began_s = time.monotonic()
        request = self.request
        self._tokens = self._room.first_tokens
        self.decoding = Decoding(
            prefilling.cache,
            Sampler(request.sampling, request.prompt_ids),
            request.prompt_ids[-1],
            self._tokens,
            alternatives=request.sampling.logprobs,
            constraint=None if request.constrain is None else request.constrain(),
        )

    def take(self, token: int, likelihood: Likelihood | None) -> None:
        """Take the next token from the batch; it may be the last."""
        self._ids.append(token)
        if self._generated == 0:
            self._first_token_s = time.monotonic() - self._submitted_s
        if token in self.request.stop_ids:
            self.finish(FinishReason.STOP)
            return
        self._generated += 1
        self._sink(TokenEvent(token, likelihood))
        if self._generated == self._tokens:
            self._go_on_or_end()

    def _go_on_or_end(self) -> None:
        """Take memory for more tokens of an answer without a limit of its own; else it ends here."""
        more = self._room.more_tokens(self._tokens)
        if not more or self.decoding is None:
            self.finish(FinishReason.LENGTH)
            return
        self._tokens += more
        self.decoding.extend(more)

    def record(self) -> None:
        """Have some rows saved, if there are enough new ones; may wait for the device."""
        if self._recorder is not None:
            self._recorder.step()

    def finish(self, reason: FinishReason) -> None:
        """End in order, also before admission: the last event is Finished."""
        decode_s = time.monotonic() - self._decode_began_s if self._decode_began_s else 0.0
        self._end(Finished(reason, self._generated, self._first_token_s, decode_s))

    def fail(self, message: str) -> None:
        """End because of an error in the engine: the last event is Failed."""
        if self._prefilling is not None and self._prefilling.begun_recorder is not None:
            self._prefilling.begun_recorder.abandon()
        self._end(Failed(message))

    def _end(self, last: Event) -> None:
        if self.ended:
            return
        self.ended = True
        log.debug("ended request=%s tokens=%d last=%s", self.request.request_id, self._generated, type(last).__name__)
        prefilling, self._prefilling, self.decoding = self._prefilling, None, None
        self._recorder = None
        try:
            if prefilling is not None:
                prefilling.abandon()
                if prefilling.begun_recorder is not None and self._workshop.recording is not None:
                    self._workshop.recording.close(prefilling.begun_recorder)
            if self._source is not None:
                self._source.cancel()
        finally:
            self._sink(last)
