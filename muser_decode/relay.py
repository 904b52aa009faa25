"""A relay of handoffs as one KV source: when a producer fails in the middle, another may carry on from there.

Chunks that were polled stay in the engine's cache, so the next handoff is asked for what comes after them [4.2].
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from muser_decode.engine.source import SlotPool, SourceDone, SourceFailed, StagedChunk
from muser_decode.producers import Handoff, Producers
from muser_decode.router import Plan

_log = logging.getLogger(__name__)


class RelaySource:
    """See `muser_decode.engine.source.KVSource`. `held_tokens` are in the engine's cache when `first` begins.

    `code` says, once this has ended, in a stable word why it was not one whole handoff, or is empty; `plan` is
    that of the only handoff, if one was enough.
    """

    def __init__(self, producers: Producers, prompt_ids: Sequence[int], held_tokens: int, first: Handoff) -> None:
        self._producers, self._ids = producers, prompt_ids
        self._begun_tokens = self._held_tokens = self._leg_tokens = held_tokens
        self._source, self.plan = first.source, first.plan if first.plan.producer is not None else None
        self._producer = str(first.plan.producer)
        self._tried: frozenset[str] = frozenset()
        self._slots: SlotPool | None = None
        self._broken: list[str] = []
        self._wire_s, self._segments, self._payload_nbytes = 0.0, 0, 0
        self.code = ""

    def begin(self, slots: SlotPool) -> None:
        """See `KVSource`."""
        self._slots = slots
        self._source.begin(slots)

    def poll(self) -> StagedChunk | SourceDone | SourceFailed | None:
        """See `KVSource`."""
        news = self._source.poll()
        if isinstance(news, StagedChunk):
            self._held_tokens = news.stop
        elif isinstance(news, SourceDone):
            return self._done(news)
        elif isinstance(news, SourceFailed):
            return self._pass_on(news)
        return news

    def cancel(self) -> None:
        """See `KVSource`."""
        self._source.cancel()

    def _done(self, done: SourceDone) -> SourceDone:
        self._count(done)
        # What an earlier producer brought counts as computed: no seal says otherwise.
        reused_tokens = self._begun_tokens + max(0, done.reused_tokens - self._leg_tokens)
        earlier_tokens = self._leg_tokens - self._begun_tokens
        broken = "; ".join(self._broken) if earlier_tokens else ""
        if not broken:
            self.code = ""
        return SourceDone(self._wire_s, self._segments, self._payload_nbytes, done.handoff_id, reused_tokens, broken)

    def _pass_on(self, failed: SourceFailed) -> SourceFailed | None:
        """Begin a handoff with another producer from here; return the failure when there is none to begin."""
        self._count(failed)
        self.code, self.plan = self.code or failed.code, None
        alone = len(self._producers) == 1
        self._broken.append(failed.reason if alone else f"{self._producer}: {failed.reason}")
        self._tried |= {self._producer}
        choice = self._choose()
        if isinstance(choice, Handoff) and self._slots is not None:
            self._log_handover(choice, failed)
            self._source, self._producer = choice.source, str(choice.plan.producer)
            self._leg_tokens = self._held_tokens
            self._source.begin(self._slots)
            return None
        if isinstance(choice, Plan) and choice.reason:
            self._broken.append(choice.reason)
        reason = "; ".join(self._broken)
        return SourceFailed(reason, self._wire_s, self._segments, self._payload_nbytes, failed.handoff_id, self.code)

    def _choose(self) -> Handoff | Plan:
        if len(self._tried) == len(self._producers) or self._held_tokens >= len(self._ids) - 1:
            return Plan(None)
        return self._producers.choose(self._ids, self._held_tokens, self._tried)

    def _count(self, ending: SourceDone | SourceFailed) -> None:
        self._wire_s += ending.wire_s
        self._segments += ending.segments_verified
        self._payload_nbytes += ending.payload_nbytes

    def _log_handover(self, choice: Handoff, failed: SourceFailed) -> None:
        _log.warning(
            "handoff_passed_on handoff=%s from=%s to=%s tokens=%d reason=%s",
            failed.handoff_id or "-",
            self._producer,
            choice.plan.producer,
            self._held_tokens,
            failed.reason,
        )
