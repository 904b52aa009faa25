"""The first half of a generation: filling its cache, from a source, from this node, or from both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from muser_decode.engine.contract import Cache, Decoder
from muser_decode.engine.pace import Pace
from muser_decode.engine.recording import Recorder, Recording
from muser_decode.engine.request import EventSink, GenerationRequest, PrefillProgress, Route, RouteReport
from muser_decode.engine.source import HeldEnded, KVSource, Origin, SourceDone, SourceFailed, StagedChunk
from muser_decode.engine.staging import Staging
from muser_decode.errors import StagedChunkInvalid
from muser_wire.kvpack.block import Block
from muser_wire.trace import now_ns, span

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workshop:
    """What the engine's thread lends to every generation. `recording` None: nothing is saved."""

    decoder: Decoder
    staging: Staging
    chunk_tokens: int
    recording: Recording | None = None
    pace: Pace = field(default_factory=Pace)


class Prefilling:
    """Brings positions [0, prompt length - 1) into a cache.

    The last prompt token is left to the first decode step, so that every sampled token comes from this
    node's own logits. When a source fails, its installed chunks stay and local prefill goes on after them.
    `reason` says why there is no source, if there is none. `ids` are those of the cache's positions; decode
    adds to them. `begun_recorder` is what has been saving this cache, if anything has. `go_on` is asked between
    two layers; once it says no, this is not advanced any more.
    """

    def __init__(
        self,
        workshop: Workshop,
        request: GenerationRequest,
        sink: EventSink,
        source: KVSource | None,
        reason: str,
        *,
        go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._workshop, self._request, self._sink, self._reason = workshop, request, sink, reason
        self._go_on = go_on
        self._began_s = time.monotonic()
        self._tokens = len(request.prompt_ids) - 1
        self._staged = dict.fromkeys(Origin, 0)
        self._producers: dict[str, int] = {}
        self._held_reason = ""
        self._decoded_from: int | None = None
        self._last_held: Block | None = None
        self.begun_recorder: Recorder | None = None
        self.ids = list(request.prompt_ids)
        self._ending: SourceDone | SourceFailed | None = None
        self.cache: Cache = workshop.decoder.new_cache()
        self.cache.reserve(len(request.prompt_ids))
        self._source = source
        if source is not None and self._tokens > 0:
            source.begin(workshop.staging.pool)
        else:
            self.abandon()

    @property
    def complete(self) -> bool:
        """Whether the cache is full and, after a handoff, its seal verified."""
        return self._source is None and self.cache.length == self._tokens

    @property
    def computes(self) -> bool:
        """Whether the next unit is computed here."""
        return self._source is None and not self.complete

    def advance(self, *, shared: bool = False) -> bool:
        """Install one staged chunk or prefill some tokens here. Returns False when the source has nothing new.

        `shared` says that others get tokens meanwhile and shall not wait long.
        """
        if self.cache.length < self._tokens and not self._saved(shared=shared):
            return True
        if self._source is None:
            self._prefill_here(shared=shared)
            return True
        news = self._source.poll()
        if isinstance(news, StagedChunk):
            self._install(news)
        elif isinstance(news, HeldEnded):
            self._end_held(news)
        elif news is not None:
            self._end_handoff(news)
        return news is not None

    def abandon(self) -> None:
        """Cancel a handoff that still runs."""
        source, self._source = self._source, None
        if source is not None:
            source.cancel()

    def recorder(self) -> Recorder | None:
        """Return what saves this cache, if anything does. The first call comes when everything held is installed."""
        recording = self._workshop.recording
        if self.begun_recorder is None and recording is not None:
            self.begun_recorder = recording.begin(self.cache, self.ids, self._last_held, self._decoded_from)
        return self.begun_recorder

    def _saved(self, *, shared: bool) -> bool:
        """Before new tokens, which may push the last ones' rows out, have those copied; return whether all of them are.

        What is held comes first, and is not saved again.
        """
        recorder = self.recorder() if self._source is None else self.begun_recorder
        return recorder is None or recorder.catch_up(shared=shared)

    def _prefill_here(self, *, shared: bool) -> None:
        """Prefill one unit, to the next boundary of the grid anchored at 0 at most, wherever the cache ends."""
        length, grid, pace = self.cache.length, self._workshop.chunk_tokens, self._workshop.pace
        boundary = min(self._tokens, (length // grid + 1) * grid)
        stop = pace.unit_stop(length, boundary, shared=shared)
        began_s = time.monotonic()
        if self._workshop.decoder.prefill_chunk(self._request.prompt_ids[length:stop], self.cache, self._go_on):
            pace.learn(stop - length, time.monotonic() - began_s)
            self._report_progress()

    def _install(self, chunk: StagedChunk) -> None:
        if chunk.origin is Origin.PEER:
            # Saving begins where what was held ends, before anything else comes.
            self.recorder()
        staging, before = self._workshop.staging, self.cache.length
        started_ns = now_ns()
        try:
            staging.install(chunk, self.cache, self._tokens)
        except StagedChunkInvalid as error:
            self.abandon()
            self._go_on_here(str(error))
            return
        finally:
            staging.pool.release(chunk.slot)
        if chunk.slab is not None and self.begun_recorder is not None:
            self.begun_recorder.take(chunk.slab)
        span("commit", chunk.start // self._workshop.chunk_tokens, started_ns)
        self._staged[chunk.origin] += self.cache.length - before
        if chunk.producer:
            self._producers[chunk.producer] = self._producers.get(chunk.producer, 0) + self.cache.length - before
        if chunk.block is not None:
            self._last_held = chunk.block
            if self._decoded_from is None and chunk.stop > chunk.block.head.prefilled_stop:
                self._decoded_from = chunk.block.head.prefilled_stop
        self._report_progress()

    def _end_held(self, ending: HeldEnded) -> None:
        self._held_reason = ending.held_reason
        if ending.rest_reason is not None:
            self._source, self._reason = None, ending.rest_reason

    def _end_handoff(self, ending: SourceDone | SourceFailed) -> None:
        self._source, self._ending = None, ending
        if isinstance(ending, SourceFailed):
            self._go_on_here(ending.reason)
        elif not self.complete:
            self._go_on_here(f"handoff ended at {self.cache.length} of {self._tokens} tokens")
        else:
            self._reason = ending.broken

    def _go_on_here(self, reason: str) -> None:
        self._reason = reason
        log.warning("handoff_lost request=%s tokens=%d reason=%s", self._request.request_id, self.cache.length, reason)

    def _report_progress(self) -> None:
        self._sink(PrefillProgress(self.cache.length, self._tokens))

    def _peer_tokens(self) -> int:
        """Return how many of the tokens that a whole handoff brought the producer did not compute for it."""
        if not isinstance(self._ending, SourceDone):
            return 0
        held_tokens = self._staged[Origin.MEMORY] + self._staged[Origin.DISK]
        return min(max(0, self._ending.reused_tokens - held_tokens), self._staged[Origin.PEER])

    def report(self) -> RouteReport:
        """Return how a complete cache came to be."""
        remote_tokens = self._staged[Origin.PEER]
        local_tokens = self._tokens - sum(self._staged.values())
        ending = self._ending
        # Only a seal completes a handoff: without one, even a cache full of verified chunks was salvaged.
        whole = isinstance(ending, SourceDone) and not ending.broken and not local_tokens
        shared = Route.REMOTE if whole else Route.SALVAGED
        alone = Route.LOCAL if local_tokens or not self._tokens else Route.WARM
        return RouteReport(
            route=shared if remote_tokens else alone,
            reason=self._reason,
            prefill_s=time.monotonic() - self._began_s,
            wire_s=ending.wire_s if ending else 0.0,
            remote_tokens=remote_tokens,
            local_tokens=local_tokens,
            segments_verified=ending.segments_verified if ending else 0,
            payload_nbytes=ending.payload_nbytes if ending else 0,
            handoff_id=ending.handoff_id if ending else "",
            memory_tokens=self._staged[Origin.MEMORY],
            disk_tokens=self._staged[Origin.DISK],
            peer_tokens=self._peer_tokens(),
            producers=tuple(self._producers.items()),
            held_reason=self._held_reason,
            held_decoded=self._decoded_from is not None,
        )
