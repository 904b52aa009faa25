"""The pairing port: plain TCP, open only while `muser pair listen` runs, one caller, few bytes, short waits [9.3].

Whoever can reach the port can speak to it, so it takes length-prefixed messages of a few kibibytes and
nothing else. What is said on it is public; what it is worth, two people decide.
"""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Self

from muser_wire.errors import TransportError
from muser_wire.pairing.exchange import MAX_MESSAGE_NBYTES

LENGTH_NBYTES = 4
CONNECT_TIMEOUT_S = 10.0
MESSAGE_TIMEOUT_S = 10.0
"""A message is there as a whole within this, or the caller is dropped; a byte now and then does not extend it."""


class PairingLink:
    """A connection that carries messages of a pairing."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def peer_host(self) -> str:
        """The other end's address."""
        return str(self._connection.getpeername()[0])

    def send(self, message: bytes) -> None:
        """Send one message; an empty one is not sent.

        Raises:
            TransportError: the connection broke.
        """
        if not message:
            return
        try:
            self._connection.settimeout(MESSAGE_TIMEOUT_S)
            self._connection.sendall(len(message).to_bytes(LENGTH_NBYTES, "big") + message)
        except OSError as error:
            raise _lost(error) from error

    def receive(self, timeout_s: float = MESSAGE_TIMEOUT_S) -> bytes:
        """Return the next message, which must be there within `timeout_s` seconds.

        Raises:
            TransportError: the connection broke or ended, time is up, or the message is larger than any.
        """
        deadline_s = time.monotonic() + timeout_s
        size = int.from_bytes(self._exactly(LENGTH_NBYTES, deadline_s), "big")
        if not 1 <= size <= MAX_MESSAGE_NBYTES:
            raise TransportError(f"the other side announces {size} bytes: it is no Muser, or another version")
        return self._exactly(size, deadline_s)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _exactly(self, nbytes: int, deadline_s: float) -> bytes:
        received = b""
        while len(received) < nbytes:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransportError("the other side sent nothing in time")
            try:
                self._connection.settimeout(left_s)
                piece = self._connection.recv(nbytes - len(received))
            except OSError as error:
                raise _lost(error) from error
            if not piece:
                raise TransportError("the other side closed the connection")
            received += piece
        return received


class PairingPort:
    """A listening port that takes one caller at a time."""

    def __init__(self, host: str, port: int) -> None:
        """Bind; 0 lets the system choose the port.

        Raises:
            TransportError: it cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=1)
        except OSError as error:
            raise TransportError(f"port {port} on {host} cannot be bound: {error.strerror or error}") from error
        self.port = int(self._listener.getsockname()[1])

    def accept(self, timeout_s: float) -> PairingLink:
        """Return the next caller's connection.

        Raises:
            TransportError: nobody called within `timeout_s` seconds.
        """
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            raise TransportError(f"nobody called within {timeout_s:.0f} s") from error
        return PairingLink(connection)

    def close(self) -> None:
        """Take no more callers."""
        self._listener.close()


def call(host: str, port: int) -> PairingLink:
    """Return a connection to a machine that runs `muser pair listen`.

    Raises:
        TransportError: nobody answers there.
    """
    try:
        return PairingLink(socket.create_connection((host, port), CONNECT_TIMEOUT_S))
    except UnicodeError as error:
        raise TransportError(f"{host!r} is no host name or address") from error
    except OSError as error:
        raise TransportError(
            f"{host}:{port} does not answer ({error.strerror or error}): is `muser pair listen` running there?"
        ) from error


def _lost(error: OSError) -> TransportError:
    return TransportError(f"the connection to the other side broke: {error.strerror or error}")
