"""The producer's service: describes itself, accepts or refuses handoffs, streams what the scheduler computes.

Every refusal comes before anything is allocated for the handoff, has a stable code [5.6] and names
both values where two differ.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muser_prefill.engine.scheduler import PrefillJob, Scheduler
from muser_prefill.errors import JobCancelled, PrefillError, ProducerBusy
from muser_prefill.observer import Observer, Sent, Unobserved
from muser_prefill.pacing import Pacer
from muser_wire.auth import NodeKey
from muser_wire.errors import GeometryError, IdentityMismatch
from muser_wire.geometry import Geometry
from muser_wire.handoff import ProducerHandoff, Terms
from muser_wire.identities import Identities, compare
from muser_wire.messages import (
    TICKET_NBYTES,
    Acceptance,
    Description,
    HandoffRequest,
    Refusal,
    decode_describe_request,
    decode_handoff_request,
    decode_stream_request,
    encode_description,
    encode_open_answer,
)
from muser_wire.model.spec import ModelSpec
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule
from muser_wire.session import TicketTable
from muser_wire.trace import now_ns, span
from muser_wire.transport.base import StreamCall

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProducerFacts:
    """What the service says of its node. `incarnation` is fresh for each start [2.4]."""

    spec: ModelSpec
    identities: Identities
    geometry: Geometry
    kernels: tuple[str, ...]
    data_port: int
    incarnation: bytes
    cache_nbytes: int = 0


@dataclass(frozen=True)
class _Accepted:
    peer: str
    place: int
    terms: Terms
    request: HandoffRequest


class _Refused(Exception):
    """Carries a refusal to where the answer is made."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message)


class ProducerService:
    """See `muser_wire.transport.base.Service`. Methods are called on several threads."""

    def __init__(
        self,
        facts: ProducerFacts,
        node_key: NodeKey,
        scheduler: Scheduler,
        *,
        max_rate: float = 0.0,
        check_peer: Callable[[str], None] = lambda fingerprint: None,
        observer: Observer | None = None,
    ) -> None:
        """Serve what `scheduler` computes; at most `max_rate` bytes leave in a second, 0: no limit [5.10].

        `check_peer` raises when the peer that a ticket was given to has been revoked since [9.6].
        """
        self._facts = facts
        self._node_key = node_key
        self._scheduler = scheduler
        self._check_peer = check_peer
        self._observer = observer or Unobserved()
        self._lock = threading.Lock()
        self._tickets: TicketTable[_Accepted] = TicketTable(lambda accepted: scheduler.release(accepted.place))
        self._draining = False
        self._streams = 0
        self._pacer = Pacer(max_rate)

    def set_max_rate(self, max_rate: float) -> None:
        """Let at most `max_rate` bytes leave in a second from the next frame on; 0: no limit."""
        with self._lock:
            self._pacer = Pacer(max_rate)

    def drain(self) -> None:
        """Refuse every new handoff; those accepted go on."""
        self._draining = True

    @property
    def under_way(self) -> bool:
        """Whether a handoff computes, waits or has been promised a place, or its last frame has not left yet."""
        return self._scheduler.load > 0 or self._streams > 0

    def describe(self, request: bytes) -> bytes:
        """Answer what this producer is, and what a handoff may expect of it now [5.11]."""
        decode_describe_request(request)
        facts = self._facts
        return encode_description(
            Description(
                identities=facts.identities,
                spec_json=facts.spec.canonical_json(),
                incarnation=facts.incarnation,
                node_key=self._node_key.public_bytes,
                data_port=facts.data_port,
                max_prompt_tokens=facts.spec.max_positions,
                kernels=facts.kernels,
                predicted_wait_ns=self._scheduler.predicted_wait_ns(),
                predicted_chunk_ns=self._scheduler.predicted_chunk_ns(),
                cache_nbytes=facts.cache_nbytes,
            )
        )

    def open(self, request: bytes, peer: str = "") -> bytes:
        """Accept a handoff and issue its ticket, or refuse it by name. The ticket is void once `peer` is revoked."""
        wanted = decode_handoff_request(request)
        try:
            answer: Acceptance | Refusal = self._accept(wanted, peer)
            self._observer.accepted()
        except _Refused as refused:
            answer = refused.refusal
            self._observer.refused(answer.code)
            _log.warning(
                "handoff_refused handoff=%s code=%s reason=%s", wanted.handoff_id.hex(), answer.code, answer.message
            )
        return encode_open_answer(answer)

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        """Yield begin, segments as they are computed, and the seal; or an abort that says why."""
        ticket = decode_stream_request(request)
        with self._lock:
            accepted = self._tickets.redeem(ticket, time.monotonic())
            self._streams += 1
        try:
            if accepted.peer:
                self._check_peer(accepted.peer)
            yield from self._handoff(accepted, call)
        finally:
            self._scheduler.release(accepted.place)
            with self._lock:
                self._streams -= 1

    def _handoff(self, accepted: _Accepted, call: StreamCall) -> Iterator[bytes]:
        terms, request = accepted.terms, accepted.request
        handoff = ProducerHandoff(terms, request.secret, self._node_key)
        code, segments, payload_nbytes, started = "gone", 0, 0, time.monotonic()
        # The last prompt token is held back: the decode node runs it [4.1].
        job = PrefillJob(accepted.place, terms.handoff_id, request.token_ids[:-1].tolist(), terms.schedule)
        gone = threading.Event()
        call.on_cancel(job.cancel)
        call.on_cancel(gone.set)
        try:
            self._scheduler.submit(job)
            yield self._paced(handoff.begin(), gone)
            for ready in job.segments():
                started_ns = now_ns()
                frame = handoff.segment(ready.segment, *ready.parts)
                span("seal", ready.segment.index, started_ns)
                started_ns = now_ns()
                yield self._paced(frame, gone)
                span("wire", ready.segment.index, started_ns)
                segments, payload_nbytes = segments + 1, payload_nbytes + ready.segment.nbytes
            yield self._paced(handoff.seal(job.prefill_ns, job.reused_tokens), gone)
            code = "sealed"
        except JobCancelled:
            pass
        except PrefillError as error:
            code = error.code
            yield handoff.abort(error.code, str(error))
        finally:
            # A reader that leaves closes this generator wherever it waits, so what became of it is told here.
            _log.info("handoff_ended handoff=%s state=%s", terms.handoff_id.hex(), handoff.state.value)
            self._observer.sent(Sent(code, segments, payload_nbytes, time.monotonic() - started))
            job.cancel()

    def _paced(self, frame: bytes, gone: threading.Event) -> bytes:
        """Return `frame` when the rate lets it leave; at once when the reader is `gone`."""
        with self._lock:
            delay_s = self._pacer.delay_s(len(frame), time.monotonic())
        if delay_s:
            gone.wait(delay_s)
        return frame

    def _accept(self, wanted: HandoffRequest, peer: str) -> Acceptance:
        self._check_identities(wanted)
        self._check_prompt(wanted)
        place, wait_ns = self._reserve(len(wanted.token_ids))
        try:
            terms = self._terms(wanted)
        except _Refused:
            self._scheduler.release(place)
            raise
        with self._lock:
            accepted = _Accepted(peer, place, terms, wanted)
            ticket = self._tickets.issue(accepted, time.monotonic(), os.urandom(TICKET_NBYTES))
        if ticket is None:
            self._scheduler.release(place)
            raise _Refused("busy", "too many accepted handoffs wait for their stream")
        return Acceptance(ticket, terms.schedule.digest, self._scheduler.predicted_chunk_ns(), wait_ns)

    def _reserve(self, tokens: int) -> tuple[int, int]:
        """Return a place in the scheduler's queue and its wait; tickets that nobody used give theirs back first."""
        with self._lock:
            self._tickets.expire(time.monotonic())
        try:
            return self._scheduler.reserve(tokens)
        except ProducerBusy as error:
            raise _Refused(error.code, str(error)) from error

    def _check_identities(self, wanted: HandoffRequest) -> None:
        if self._draining:
            raise _Refused("draining", "the producer is shutting down")
        if wanted.incarnation != self._facts.incarnation:
            raise _Refused("stale_incarnation", "the producer has restarted since it described itself")
        try:
            compare(self._facts.identities, wanted.expected, allow_unqualified=wanted.allow_unqualified)
        except IdentityMismatch as error:
            raise _Refused(error.code, str(error)) from error

    def _check_prompt(self, wanted: HandoffRequest) -> None:
        spec, tokens = self._facts.spec, len(wanted.token_ids)
        if tokens > spec.max_positions:
            raise _Refused("prompt_too_long", f"the prompt has {tokens} tokens, the model takes {spec.max_positions}")
        windows = self._facts.geometry.windows
        if wanted.policy is not WindowPolicy.ROLLING and any(window is not None for window in windows):
            raise _Refused("window_policy", "sliding layers are sent by the policy rolling alone")
        highest = int(wanted.token_ids.max())
        if highest >= spec.vocab_size:
            raise _Refused("bad_token", f"token id {highest} is outside the vocabulary of {spec.vocab_size}")

    def _terms(self, wanted: HandoffRequest) -> Terms:
        try:
            schedule = build_schedule(
                ScheduleRequest(
                    geometry=self._facts.geometry,
                    prompt_tokens=len(wanted.token_ids),
                    held_tokens=wanted.held_tokens,
                    chunk_tokens=self._facts.identities.chunk_tokens,
                    policy=wanted.policy,
                )
            )
        except GeometryError as error:
            raise _Refused(error.code, str(error)) from error
        return Terms(wanted.handoff_id, self._facts.identities, self._facts.incarnation, schedule)
