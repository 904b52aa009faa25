"""What a transport connects: a producer's service on one side, a consumer's channel on the other.

Both speak bytes. A service raises errors of `muser_wire.errors`; a channel raises
`TransportError` for what went wrong in between, and `RemoteProtocolError` when the producer said
that a request was not valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class StreamCall(Protocol):
    """The producer's handle on a stream that a consumer reads."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on any thread, when the consumer has gone or cancelled; at once if it already has."""


class Service(Protocol):
    """A producer as a transport serves it. Methods are called on several threads."""

    def describe(self, request: bytes) -> bytes:
        """Answer a describe request."""

    def open(self, request: bytes, peer: str) -> bytes:
        """Answer an open request of a paired node; `peer` is its fingerprint, empty within one machine."""

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        """Yield the frames of a redeemed ticket. Closing the iterator, or `call`'s cancel, ends the work."""


class FrameStream(Protocol):
    """The consumer's side of a stream: an iterator of frames that another thread may cancel."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield frames until the producer closes the stream.

        Raises:
            TransportError: the connection broke.
        """

    def cancel(self) -> None:
        """End the stream; the producer stops its work. The iterator then raises or ends."""


class Channel(Protocol):
    """A consumer's connection to one producer."""

    def describe(self, request: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        """Ask what the producer is. With `wait` one that cannot be reached is tried again until the time is over."""

    def open(self, request: bytes, timeout_s: float) -> bytes:
        """Ask for a handoff."""

    def stream(self, request: bytes, data_port: int) -> FrameStream:
        """Redeem a ticket on the producer's data port."""

    def close(self) -> None:
        """Give the connection up; calls under way end with an error."""
