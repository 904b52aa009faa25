"""One request on its way through the engine: `advance` does one bounded unit of work.

A unit is: install one staged chunk, prefill one chunk here, or decode one token. Whatever a request
needs, others wait for a unit at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

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
    TokenEvent,
)
from muser_decode.engine.sampling import Sampler
from muser_decode.engine.source import KVSource

log = logging.getLogger(__name__)


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
        self._decoding: Decoding | None = None
        self._ids: list[int] = []
        self._recorder: Recorder | None = None
        self._generated = 0
        self._first_token_s = 0.0
        self._decode_began_s = 0.0
        self.ended = False

    def cancel(self) -> None:
        """Ask for the end. It comes, as a Finished event, once each active generation has done a unit."""
        self._cancelled.set()
        self._wake()

    @property
    def cancelled(self) -> bool:
        """Whether the end was asked for."""
        return self._cancelled.is_set()

    def admit(self, workshop: Workshop) -> None:
        """Begin: take a cache, and start the handoff if there is a source."""
        self._workshop = workshop
        source, self._source = self._source, None
        self._prefilling = Prefilling(workshop, self.request, self._sink, source, self._reason)

    def advance(self) -> bool:
        """Do one unit of an admitted generation. Returns False when it waits for its source."""
        if self.cancelled:
            self.finish(FinishReason.CANCELLED)
            return True
        if self._decoding is not None:
            self._decode(self._decoding)
            return True
        if self._prefilling is None:
            raise RuntimeError("advance comes after admit")
        if not self._prefilling.complete:
            return self._prefilling.advance()
        self._begin_decode(self._prefilling)
        return True

    def _begin_decode(self, prefilling: Prefilling) -> None:
        report = prefilling.report()
        self._ids, self._recorder = prefilling.ids, prefilling.recorder()
        self._sink(report)
        self._decode_began_s = time.monotonic()
        decoder, request = self._workshop.decoder, self.request
        self._tokens = min(request.max_new_tokens, decoder.spec.max_positions - len(request.prompt_ids))
        self._decoding = Decoding(
            decoder,
            prefilling.cache,
            Sampler(request.sampling, request.prompt_ids),
            request.prompt_ids[-1],
            self._tokens,
            alternatives=request.sampling.logprobs,
            constraint=None if request.constrain is None else request.constrain(),
        )
        self._decode(self._decoding)

    def _decode(self, decoding: Decoding) -> None:
        token = decoding.next()
        self._ids.append(token)
        if self._generated == 0:
            self._first_token_s = time.monotonic() - self._submitted_s
        if token in self.request.stop_ids:
            self.finish(FinishReason.STOP)
            return
        self._generated += 1
        if self._recorder is not None:
            self._recorder.step()
        self._sink(TokenEvent(token, decoding.likelihood))
        if self._generated == self._tokens:
            self.finish(FinishReason.LENGTH)

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
        prefilling, self._prefilling, self._decoding = self._prefilling, None, None
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
