"""The producer's service: describes itself, accepts or refuses handoffs, streams what the scheduler computes.

Every refusal comes before anything is allocated for the handoff, has a stable code [5.6] and names
both values where two differ.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from muser_prefill.engine.scheduler import PrefillJob, Scheduler
from muser_prefill.errors import JobCancelled, PrefillError, ProducerBusy
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
from muser_wire.schedule import ScheduleRequest, build_schedule
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


@dataclass(frozen=True)
class _Accepted:
    terms: Terms
    request: HandoffRequest


class _Refused(Exception):
    """Carries a refusal to where the answer is made."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message)


class ProducerService:
    """See `muser_wire.transport.base.Service`. Methods are called on several threads."""

    def __init__(self, facts: ProducerFacts, node_key: NodeKey, scheduler: Scheduler) -> None:
        self._facts = facts
        self._node_key = node_key
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._tickets: TicketTable[_Accepted] = TicketTable()
        self._draining = False

    def drain(self) -> None:
        """Refuse every new handoff; those accepted go on."""
        self._draining = True

    def describe(self, request: bytes) -> bytes:
        """Answer what this producer is."""
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
            )
        )

    def open(self, request: bytes) -> bytes:
        """Accept a handoff and issue its ticket, or refuse it by name."""
        wanted = decode_handoff_request(request)
        try:
            answer: Acceptance | Refusal = self._accept(wanted)
        except _Refused as refused:
            answer = refused.refusal
            _log.warning(
                "handoff_refused handoff=%s code=%s reason=%s", wanted.handoff_id.hex(), answer.code, answer.message
            )
        return encode_open_answer(answer)

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        """Yield begin, segments as they are computed, and the seal; or an abort that says why."""
        ticket = decode_stream_request(request)
        with self._lock:
            accepted = self._tickets.redeem(ticket, time.monotonic())
        handoff = ProducerHandoff(accepted.terms, accepted.request.secret, self._node_key)
        # The last prompt token is held back: the decode node runs it [4.1].
        job = PrefillJob(accepted.terms.handoff_id, accepted.request.token_ids[:-1].tolist(), accepted.terms.schedule)
        call.on_cancel(job.cancel)
        try:
            self._scheduler.submit(job)
            yield handoff.begin()
            for ready in job.segments():
                started_ns = now_ns()
                frame = handoff.segment(ready.segment, ready.payload)
                span("seal", ready.segment.index, started_ns)
                started_ns = now_ns()
                yield frame
                span("wire", ready.segment.index, started_ns)
            yield handoff.seal(job.prefill_ns)
        except JobCancelled:
            _log.info("handoff_cancelled handoff=%s", accepted.terms.handoff_id.hex())
        except PrefillError as error:
            yield handoff.abort(error.code, str(error))
        finally:
            job.cancel()

    def _accept(self, wanted: HandoffRequest) -> Acceptance:
        self._check_identities(wanted)
        self._check_prompt(wanted)
        try:
            self._scheduler.check_capacity()
        except ProducerBusy as error:
            raise _Refused(error.code, str(error)) from error
        terms = self._terms(wanted)
        with self._lock:
            ticket = self._tickets.issue(_Accepted(terms, wanted), time.monotonic(), os.urandom(TICKET_NBYTES))
        if ticket is None:
            raise _Refused("busy", "too many accepted handoffs wait for their stream")
        return Acceptance(ticket, terms.schedule.digest, self._scheduler.predicted_chunk_ns())

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
