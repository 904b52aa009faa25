"""The consumer's view of one producer: what it says of itself, whether it fits, and opening handoffs.

A monitor thread asks `Describe` every second, so that a request never waits to learn that the
producer is gone, frozen or wrong, and a producer that comes back is used again without help. One that
fails again and again is asked, and offered work, less and less often.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from muser_decode.standing import Rest, Standing
from muser_wire.errors import HandoffRefused, IdentityMismatch, RemoteProtocolError, TransportError, WireError
from muser_wire.geometry import Geometry
from muser_wire.handoff import ConsumerHandoff, Terms
from muser_wire.identities import Identities, compare, show
from muser_wire.messages import (
    ID_NBYTES,
    SECRET_NBYTES,
    Acceptance,
    Description,
    HandoffRequest,
    decode_description,
    decode_open_answer,
    encode_describe_request,
    encode_handoff_request,
    encode_stream_request,
)
from muser_wire.model.spec import ModelSpec, spec_difference
from muser_wire.schedule import Schedule, ScheduleRequest, WindowPolicy, build_schedule
from muser_wire.transport.base import Channel, FrameStream

POLL_S = 1.0
"""How often the producer is asked what it is."""

CALL_TIMEOUT_S = 2.0
"""Bound on describe and open: a round trip takes under a millisecond, a frozen peer must not hold a user."""

SECOND_TRY_S = 1.0
"""How long a producer that was ready and did not answer has for a second answer: a busy machine may miss a keepalive
ping, and the connection with it; one that is gone still is known to be within 2 s."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Consumer:
    """What this node is, as its producer must match it."""

    spec: ModelSpec
    identities: Identities
    geometry: Geometry
    allow_unqualified: bool = False


class ProducerState(Enum):
    """What is known of the producer."""

    UNKNOWN = "unknown"
    READY = "ready"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"


@dataclass(frozen=True)
class ProducerStatus:
    """The producer as last seen, at the monotonic time `asked_s`; `reason` says why it is not ready."""

    state: ProducerState
    reason: str
    description: Description | None = None
    asked_s: float = 0.0


@dataclass(frozen=True)
class OpenedHandoff:
    """An accepted handoff whose stream has begun."""

    handoff: ConsumerHandoff
    schedule: Schedule
    stream: FrameStream
    predicted_chunk_s: float
    predicted_wait_s: float


class ProducerClient:
    """One producer, known by `name` in logs, metrics and answers. Methods may be called on any thread.

    `node_key` is that of a paired producer; without it the first one shown is kept [2.5].
    """

    def __init__(
        self, channel: Channel, consumer: Consumer, node_key: bytes | None = None, name: str = "producer"
    ) -> None:
        self.name = name
        self.standing = Standing()
        """What came of its handoffs."""
        self._channel = channel
        self._consumer = consumer
        self._status = ProducerStatus(ProducerState.UNKNOWN, "not asked yet")
        self._node_key = node_key
        self._refreshing = threading.Lock()
        self._stopped = threading.Event()
        self._wanted = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="producer-monitor", daemon=True)

    @property
    def status(self) -> ProducerStatus:
        """What is known of the producer: a ready one was asked within the last poll interval and timeout."""
        return self._status

    def start(self) -> None:
        """Ask once, within the call's timeout, then watch in the background."""
        self.refresh()
        self._monitor.start()

    def stop(self) -> None:
        """End the watch and the connection."""
        self._stopped.set()
        self._wanted.set()
        self._channel.close()
        if self._monitor.is_alive():
            self._monitor.join(CALL_TIMEOUT_S + POLL_S)

    def refresh(self) -> ProducerStatus:
        """Ask the producer what it is and compare it with this node. One at a time: an older answer never wins."""
        with self._refreshing:
            self._status = self._ask_status()
            return self._status

    def _ask_status(self) -> ProducerStatus:
        try:
            description = decode_description(self._describe())
            self._check(description)
            status = ProducerStatus(ProducerState.READY, "", description, time.monotonic())
            self.standing.met(description.incarnation)
        except (IdentityMismatch, RemoteProtocolError, HandoffRefused) as error:
            status = ProducerStatus(ProducerState.REFUSED, str(error))
        except WireError as error:
            status = ProducerStatus(ProducerState.UNREACHABLE, str(error))
        if (status.state, status.reason) != (self._status.state, self._status.reason):
            level = logging.INFO if status.state is ProducerState.READY else logging.WARNING
            _log.log(level, "producer name=%s state=%s reason=%s", self.name, status.state.value, status.reason or "-")
        return status

    def _describe(self) -> bytes:
        """Return what the producer says of itself. One miss of a producer that was ready is no sign yet [5.7]."""
        try:
            return self._channel.describe(encode_describe_request(), CALL_TIMEOUT_S)
        except TransportError as missed:
            if self._status.state is not ProducerState.READY or self._stopped.is_set():
                raise
            try:
                return self._channel.describe(encode_describe_request(), SECOND_TRY_S, wait=True)
            except TransportError:
                raise missed from None

    def open(self, prompt_ids: Sequence[int], held_tokens: int = 0) -> OpenedHandoff:
        """Open a handoff for a prompt of at least two tokens and start its stream.

        The first `held_tokens`, windows included, are here already and do not travel [4.2].

        Raises:
            WireError: the producer is not ready, differs, refuses or cannot be reached; the message says which.
        """
        status = self._status
        if status.description is None:
            raise HandoffRefused(status.state.value, status.reason)
        try:
            return self._open(status.description, prompt_ids, held_tokens)
        except HandoffRefused as refused:
            if refused.reason != "stale_incarnation":
                raise
        # The producer has restarted since the last poll: ask what it is now, and try once more.
        status = self.refresh()
        if status.description is None:
            raise HandoffRefused(status.state.value, status.reason)
        return self._open(status.description, prompt_ids, held_tokens)

    def _open(self, description: Description, prompt_ids: Sequence[int], held_tokens: int) -> OpenedHandoff:
        consumer = self._consumer
        request = HandoffRequest(
            handoff_id=os.urandom(ID_NBYTES),
            expected=consumer.identities,
            incarnation=description.incarnation,
            token_ids=np.asarray(prompt_ids, dtype=np.uint32),
            held_tokens=held_tokens,
            policy=WindowPolicy.ROLLING,
            secret=os.urandom(SECRET_NBYTES),
            allow_unqualified=consumer.allow_unqualified,
        )
        schedule = build_schedule(
            ScheduleRequest(
                geometry=consumer.geometry,
                prompt_tokens=len(prompt_ids),
                held_tokens=request.held_tokens,
                chunk_tokens=consumer.identities.chunk_tokens,
                policy=request.policy,
            )
        )
        acceptance = self._ask(request, schedule)
        terms = Terms(request.handoff_id, consumer.identities, description.incarnation, schedule)
        handoff = ConsumerHandoff(
            terms, request.secret, description.node_key, allow_unqualified=consumer.allow_unqualified
        )
        stream = self._channel.stream(encode_stream_request(acceptance.ticket), description.data_port)
        return OpenedHandoff(
            handoff, schedule, stream, acceptance.predicted_chunk_ns / 1e9, acceptance.predicted_wait_ns / 1e9
        )

    def _ask(self, request: HandoffRequest, schedule: Schedule) -> Acceptance:
        answer = decode_open_answer(self._channel.open(encode_handoff_request(request), CALL_TIMEOUT_S))
        if not isinstance(answer, Acceptance):
            raise HandoffRefused(answer.code, answer.message)
        if answer.schedule_digest != schedule.digest:
            raise IdentityMismatch("schedule_digest", show(schedule.digest), show(answer.schedule_digest))
        return answer

    def _check(self, description: Description) -> None:
        ours, theirs = self._consumer.identities, description.identities
        if ours.spec_digest != theirs.spec_digest:
            raise spec_difference(self._consumer.spec, description.spec_json, theirs.spec_digest)
        compare(ours, theirs, allow_unqualified=self._consumer.allow_unqualified)
        if self._node_key is None:
            self._node_key = description.node_key
        elif self._node_key != description.node_key:
            raise IdentityMismatch("node_key", show(self._node_key), show(description.node_key))

    def _reconnect(self) -> None:
        """Give a connection that was lost the time to come back.

        A call that fails at once leaves gRPC no time to connect; the answer of this one is of no use.
        """
        if self._status.state is ProducerState.UNREACHABLE:
            with contextlib.suppress(WireError):
                self._channel.describe(encode_describe_request(), CALL_TIMEOUT_S, wait=True)

    def look(self) -> None:
        """Have the monitor ask at once, whatever its interval: something was wrong with this producer."""
        self._wanted.set()

    def _watch(self) -> None:
        rest = Rest(POLL_S)
        wait_s = POLL_S
        while not self._stopped.is_set():
            self._wanted.wait(wait_s)
            self._wanted.clear()
            if self._stopped.is_set():
                return
            try:
                self._reconnect()
                self.refresh()
            except Exception as error:  # outermost loop of the monitor: a fault must not leave an old status standing
                _log.exception("producer_monitor_failed")
                self._status = ProducerStatus(ProducerState.UNREACHABLE, f"internal: {type(error).__name__}")
            wait_s = rest.succeeded() if self._status.state is ProducerState.READY else rest.failed()
