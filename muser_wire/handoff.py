"""The handoff: one request's state moving once, begin to seal. Both sides' state machines, without IO [7].

One literal table serves both: a frame kind that has no entry for the current state is an error, and
an error breaks the handoff before it is raised. End of input is never success: only a verified
seal that matches the schedule is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from muser_wire.auth import Buffer, NodeKey, SealStatement, derive_frame_key, verify_seal
from muser_wire.errors import (
    FrameError,
    HandoffAborted,
    IdentityMismatch,
    LocalProtocolError,
    SealError,
    TransportError,
    WireError,
)
from muser_wire.framing import FrameReader, FrameWriter, SealedFrame
from muser_wire.identities import Digest, Identities, compare, show
from muser_wire.messages import (
    Abort,
    Begin,
    FrameKind,
    Seal,
    decode_abort,
    decode_begin,
    decode_seal,
    encode_abort,
    encode_begin,
    encode_seal,
)
from muser_wire.schedule import Schedule, Segment


class HandoffState(Enum):
    """Where a handoff stands."""

    OPENED = "opened"
    STREAMING = "streaming"
    SEALED = "sealed"
    BROKEN = "broken"


TRANSITIONS: dict[tuple[HandoffState, FrameKind], HandoffState] = {
    (HandoffState.OPENED, FrameKind.BEGIN): HandoffState.STREAMING,
    (HandoffState.OPENED, FrameKind.ABORT): HandoffState.BROKEN,
    (HandoffState.STREAMING, FrameKind.SEGMENT): HandoffState.STREAMING,
    (HandoffState.STREAMING, FrameKind.SEAL): HandoffState.SEALED,
    (HandoffState.STREAMING, FrameKind.ABORT): HandoffState.BROKEN,
}


@dataclass(frozen=True)
class Terms:
    """What both sides agreed on before the first frame [7.1]."""

    handoff_id: bytes
    identities: Identities
    incarnation: bytes
    schedule: Schedule

    def begin(self) -> Begin:
        """Return the begin frame's content that these terms demand."""
        return Begin(
            handoff_id=self.handoff_id,
            identities=self.identities,
            incarnation=self.incarnation,
            schedule_digest=self.schedule.digest,
            segments=len(self.schedule.segments),
            payload_nbytes=self.schedule.payload_nbytes,
        )

    def statement(self, transcript_digest: Digest, prefill_ns: int, reused_tokens: int) -> SealStatement:
        """Return what the producer signs when these terms are fulfilled."""
        return SealStatement(
            handoff_id=self.handoff_id,
            schedule_digest=self.schedule.digest,
            transcript_digest=transcript_digest,
            segments=len(self.schedule.segments),
            payload_nbytes=self.schedule.payload_nbytes,
            prefill_ns=prefill_ns,
            reused_tokens=reused_tokens,
        )


def transition(before: HandoffState, kind: FrameKind, error: type[WireError]) -> HandoffState:
    """Return the state that a frame leads to, or raise `error` where the table has no entry."""
    after = TRANSITIONS.get((before, kind))
    if after is None:
        raise error(f"a {kind.name.lower()} frame cannot come when the handoff is {before.value}")
    return after


class _Machine:
    """State, position in the schedule, and the one way to move."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.state = HandoffState.OPENED
        self.next_segment = 0

    def apply(self, kind: FrameKind, error: type[WireError]) -> None:
        """Move by one frame, or break and raise `error`."""
        before, self.state = self.state, HandoffState.BROKEN
        self.state = transition(before, kind, error)

    def due(self, error: type[WireError]) -> Segment:
        """Return the segment that must come next, or break and raise `error`."""
        segments = self.terms.schedule.segments
        if self.next_segment == len(segments):
            self.state = HandoffState.BROKEN
            raise error(f"all {len(segments)} segments of the schedule have been sent")
        return segments[self.next_segment]

    def check_complete(self, error: type[WireError]) -> None:
        """Break and raise `error` unless every segment has passed."""
        total = len(self.terms.schedule.segments)
        if self.next_segment != total:
            self.state = HandoffState.BROKEN
            raise error(f"sealed after {self.next_segment} of {total} segments")


class ProducerHandoff:
    """The producer's side: returns the bytes of each frame, and refuses to build a wrong one."""

    def __init__(self, terms: Terms, secret: bytes, node_key: NodeKey) -> None:
        self._machine = _Machine(terms)
        self._writer = FrameWriter(derive_frame_key(secret, terms.handoff_id), terms.handoff_id)
        self._node_key = node_key

    @property
    def state(self) -> HandoffState:
        """Where this side stands."""
        return self._machine.state

    def begin(self) -> bytes:
        """Return the begin frame."""
        self._machine.apply(FrameKind.BEGIN, LocalProtocolError)
        return self._writer.write(FrameKind.BEGIN, encode_begin(self._machine.terms.begin()))

    def segment(self, segment: Segment, *parts: Buffer) -> bytes:
        """Return the frame of the next segment; its payload is the joined `parts`, each a buffer of bytes.

        Raises:
            LocalProtocolError: `segment` is not the next of the schedule, or the payload has not its size.
        """
        machine = self._machine
        machine.apply(FrameKind.SEGMENT, LocalProtocolError)
        due = machine.due(LocalProtocolError)
        nbytes = sum(map(len, parts))
        if segment != due or nbytes != due.nbytes:
            machine.state = HandoffState.BROKEN
            raise LocalProtocolError(
                f"segment {due.index} of {due.nbytes} bytes was due, not {segment.index} of {nbytes}"
            )
        machine.next_segment += 1
        return self._writer.write(FrameKind.SEGMENT, *parts)

    def seal(self, prefill_ns: int, reused_tokens: int = 0) -> bytes:
        """Return the signed seal: how long the computation took, and how many leading tokens it did not have to run."""
        machine = self._machine
        machine.apply(FrameKind.SEAL, LocalProtocolError)
        machine.check_complete(LocalProtocolError)
        transcript = self._writer.transcript_digest()
        statement = machine.terms.statement(transcript, prefill_ns, reused_tokens)
        seal = Seal(
            transcript_digest=transcript,
            segments=statement.segments,
            payload_nbytes=statement.payload_nbytes,
            prefill_ns=prefill_ns,
            reused_tokens=reused_tokens,
            signature=self._node_key.sign(statement.encode()),
        )
        return self._writer.write(FrameKind.SEAL, encode_seal(seal))

    def abort(self, code: str, message: str) -> bytes:
        """Return the frame that ends the handoff without success."""
        self._machine.apply(FrameKind.ABORT, LocalProtocolError)
        return self._writer.write(FrameKind.ABORT, encode_abort(Abort(code, message)))


@dataclass(frozen=True)
class Begun:
    """The producer's begin frame is verified and names what was agreed."""


@dataclass(frozen=True)
class SegmentVerified:
    """`segment`'s planes are verified and lie where the caller asked for them."""

    segment: Segment


@dataclass(frozen=True)
class Sealed:
    """The handoff is complete. `prefill_ns` is the producer's own measure; its cache gave `reused_tokens` of them."""

    prefill_ns: int
    reused_tokens: int
    seal: Seal


HandoffEvent = Begun | SegmentVerified | Sealed
Destination = Callable[[Segment], memoryview]
"""Returns the writable memory, of exactly the segment's size, that its planes shall lie in."""


class ConsumerHandoff:
    """The consumer's side: takes each frame's bytes, returns what they mean, and verifies before it says so."""

    def __init__(self, terms: Terms, secret: bytes, node_key: bytes, *, allow_unqualified: bool = False) -> None:
        self._machine = _Machine(terms)
        self._reader = FrameReader(derive_frame_key(secret, terms.handoff_id), terms.handoff_id)
        self._node_key = node_key
        self._allow_unqualified = allow_unqualified

    @property
    def handoff_id(self) -> bytes:
        """The 16 bytes that name this handoff on both nodes."""
        return self._machine.terms.handoff_id

    @property
    def state(self) -> HandoffState:
        """Where this side stands."""
        return self._machine.state

    def receive(self, raw: bytes, destination: Destination) -> HandoffEvent:
        """Verify one frame and return what it means. Planes lie in `destination(segment)` afterwards.

        Raises:
            HandoffAborted: the producer gave up; it says why.
            RemoteProtocolError: the frame is wrong in form, place, content or authenticity. The
                handoff is broken, and memory that was handed out for this frame holds nothing of use.
        """
        machine = self._machine
        # Whatever happens below, and whoever's fault it is: without a verified frame there is no state to go on from.
        before, machine.state = machine.state, HandoffState.BROKEN
        frame = self._reader.parse(raw)
        after = transition(before, frame.kind, FrameError)
        event = self._event(frame, destination)
        machine.state = after
        return event

    def end_of_input(self) -> None:
        """Say that the peer closed the stream.

        Raises:
            TransportError: it did so before the seal.
        """
        machine = self._machine
        if machine.state is HandoffState.SEALED:
            return
        machine.state = HandoffState.BROKEN
        total = len(machine.terms.schedule.segments)
        raise TransportError(f"the stream ended after {machine.next_segment} of {total} segments, without a seal")

    def _event(self, frame: SealedFrame, destination: Destination) -> HandoffEvent:
        match frame.kind:
            case FrameKind.BEGIN:
                self._check_begin(decode_begin(self._plaintext(frame)))
                return Begun()
            case FrameKind.SEGMENT:
                segment = self._machine.due(FrameError)
                if frame.payload_nbytes != segment.nbytes:
                    raise FrameError(
                        f"segment {segment.index} has {segment.nbytes} bytes, the peer sent {frame.payload_nbytes}"
                    )
                self._reader.open(frame, destination(segment))
                self._machine.next_segment += 1
                return SegmentVerified(segment)
            case FrameKind.SEAL:
                self._machine.check_complete(SealError)
                transcript = self._reader.transcript_digest()
                return self._check_seal(decode_seal(self._plaintext(frame)), transcript)
            case FrameKind.ABORT:
                abort = decode_abort(self._plaintext(frame))
                raise HandoffAborted(abort.code, abort.message)

    def _plaintext(self, frame: SealedFrame) -> bytes:
        out = bytearray(frame.payload_nbytes)
        self._reader.open(frame, memoryview(out))
        return bytes(out)

    def _check_begin(self, begin: Begin) -> None:
        due = self._machine.terms.begin()
        compare(due.identities, begin.identities, allow_unqualified=self._allow_unqualified)
        for field in fields(Begin):
            ours, theirs = getattr(due, field.name), getattr(begin, field.name)
            if field.name != "identities" and ours != theirs:
                raise IdentityMismatch(field.name, show(ours), show(theirs))

    def _check_seal(self, seal: Seal, transcript: Digest) -> Sealed:
        statement = self._machine.terms.statement(transcript, seal.prefill_ns, seal.reused_tokens)
        for name in ("transcript_digest", "segments", "payload_nbytes"):
            ours, theirs = getattr(statement, name), getattr(seal, name)
            if ours != theirs:
                raise SealError(f"the seal's {name} is {show(theirs)}, {show(ours)} was received")
        verify_seal(statement, seal.signature, self._node_key)
        return Sealed(seal.prefill_ns, seal.reused_tokens, seal)
