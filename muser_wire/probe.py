"""Probes: what the link between two nodes can do, measured through the transport that handoffs use [8].

The messages, and the producer's side. Nothing here touches a model, and nothing of a probe is secret,
encrypted or verified: its bytes mean nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from muser_wire.errors import LocalProtocolError, RemoteProtocolError
from muser_wire.fields import blob, number, parse
from muser_wire.framing import varint
from muser_wire.messages import PROTOCOL_VERSION, TICKET_NBYTES, check_version, decode_stream_request
from muser_wire.session import TicketTable
from muser_wire.stubs import producer_pb2 as pb

MAX_ECHO_NBYTES = 64 << 10
"""The largest echoed payload, in bytes."""

MAX_STREAM_NBYTES = 1 << 30
"""The longest stream, in bytes: a second of 10 Gbit/s is enough to measure one."""

PIECE_NBYTES = 1 << 20
"""Payload of one message, in bytes: as large as a segment aims to be, so that a probe costs what a handoff costs."""

_PIECE_FIELD = b"\x0a"
_PIECE_HEADS_NBYTES = (2, 3, 4)
"""A piece begins with one byte of tag and one to three of length."""


def encode_probe(payload: bytes) -> bytes:
    """Return the bytes of a probe request."""
    return pb.ProbeRequest(protocol_version=PROTOCOL_VERSION, payload=payload).SerializeToString()


def decode_probe(raw: bytes) -> bytes:
    """Return the payload of a probe request.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.ProbeRequest, raw)
    check_version(stub)
    return blob(stub, "payload", 0, MAX_ECHO_NBYTES)


def encode_probe_answer(payload: bytes) -> bytes:
    """Return the bytes of a probe response."""
    return pb.ProbeResponse(payload=payload).SerializeToString()


def decode_probe_answer(raw: bytes, payload: bytes) -> None:
    """Check that a probe response echoes `payload`.

    Raises:
        RemoteProtocolError: it does not.
    """
    if blob(parse(pb.ProbeResponse, raw), "payload", 0, MAX_ECHO_NBYTES) != payload:
        raise RemoteProtocolError("ProbeResponse.payload is not what was sent")


def encode_open_probe(nbytes: int) -> bytes:
    """Return the bytes of a request for a stream of `nbytes` bytes."""
    return pb.OpenProbeRequest(protocol_version=PROTOCOL_VERSION, nbytes=nbytes).SerializeToString()


def decode_open_probe(raw: bytes) -> int:
    """Return how many bytes are wanted.

    Raises:
        RemoteProtocolError: a field is absent, unknown or out of range.
    """
    stub = parse(pb.OpenProbeRequest, raw)
    check_version(stub)
    return number(stub, "nbytes", 1, MAX_STREAM_NBYTES)


def encode_probe_ticket(ticket: bytes) -> bytes:
    """Return the bytes of the answer to a request for a stream."""
    return pb.OpenProbeResponse(ticket=ticket).SerializeToString()


def decode_probe_ticket(raw: bytes) -> bytes:
    """Return the ticket of a stream.

    Raises:
        RemoteProtocolError: it is absent or has another size.
    """
    return blob(parse(pb.OpenProbeResponse, raw), "ticket", TICKET_NBYTES)


def encode_piece(payload: bytes) -> bytes:
    """Return the bytes of one message of a stream."""
    return pb.ProbePiece(payload=payload).SerializeToString()


def piece_nbytes(raw: bytes) -> int:
    """Return how many payload bytes a message of a stream carries; the payload itself is not touched.

    Raises:
        RemoteProtocolError: it is not a piece, or larger than one may be.
    """
    for head_nbytes in _PIECE_HEADS_NBYTES:
        nbytes = len(raw) - head_nbytes
        if 1 <= nbytes <= PIECE_NBYTES and raw[:head_nbytes] == _PIECE_FIELD + varint(nbytes):
            return nbytes
    raise RemoteProtocolError(f"a message of {len(raw)} bytes is no piece of 1 to {PIECE_NBYTES} bytes")


class ProbeResponder:
    """Answers probes on the producer. Methods are called on several threads; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: TicketTable[int] = TicketTable()
        self._streaming = threading.Lock()

    def echo(self, request: bytes) -> bytes:
        """Answer a probe."""
        return encode_probe_answer(decode_probe(request))

    def open(self, request: bytes) -> bytes:
        """Issue a ticket for a stream."""
        nbytes = decode_open_probe(request)
        with self._lock:
            ticket = self._tickets.issue(nbytes, self._clock(), os.urandom(TICKET_NBYTES))
        if ticket is None:
            raise LocalProtocolError("too many probes wait for their stream")
        return encode_probe_ticket(ticket)

    def stream(self, request: bytes) -> Iterator[bytes]:
        """Yield the pieces of one stream.

        Raises:
            RemoteProtocolError: the ticket is unknown, used or too old.
            LocalProtocolError: another probe is streaming; two would measure each other.
        """
        ticket = decode_stream_request(request)
        with self._lock:
            nbytes = self._tickets.redeem(ticket, self._clock())
        if not self._streaming.acquire(blocking=False):
            raise LocalProtocolError("another probe is streaming")
        try:
            yield from _pieces(nbytes)
        finally:
            self._streaming.release()


def _pieces(nbytes: int) -> Iterator[bytes]:
    """Yield `nbytes` of noise; whole pieces are one object, so that making them costs nothing."""
    noise = os.urandom(min(nbytes, PIECE_NBYTES))
    whole = encode_piece(noise)
    for _ in range(nbytes // len(noise)):
        yield whole
    if nbytes % len(noise):
        yield encode_piece(noise[: nbytes % len(noise)])
