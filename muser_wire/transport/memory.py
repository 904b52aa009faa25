"""A transport without sockets: joins a service and a channel in one process. Ships for tests and tools.

Frames are pulled one at a time by the reader, so backpressure is exact: the producer is never ahead
by more than its own queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

from muser_wire.errors import TransportError
from muser_wire.transport.base import Service


class MemoryCall:
    """The producer's handle on a stream in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.cancelled = False

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `StreamCall`."""
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> None:
        """Run the callbacks, once."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
            self.cancelled = True
        for callback in callbacks:
            callback()


class MemoryStream:
    """Frames straight from a service's iterator."""

    def __init__(self, service: Service, request: bytes) -> None:
        self._call = MemoryCall()
        self._frames = service.stream(request, self._call)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the service's frames; a cancelled stream raises `TransportError`."""
        try:
            for frame in self._frames:
                if self._call.cancelled:
                    raise TransportError("the stream was cancelled")
                yield frame
        finally:
            self._call.cancel()
            if isinstance(self._frames, Generator):
                self._frames.close()

    def cancel(self) -> None:
        """See `FrameStream`."""
        self._call.cancel()


class MemoryChannel:
    """A channel to a service in the same process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._closed = False

    def describe(self, request: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        """See `Channel`; the timeout is not watched, as nothing here waits."""
        self._check_open()
        return self._service.describe(request)

    def open(self, request: bytes, timeout_s: float) -> bytes:
        """See `Channel`; the timeout is not watched, as nothing here waits."""
        self._check_open()
        return self._service.open(request, "")

    def stream(self, request: bytes, data_port: int) -> MemoryStream:
        """See `Channel`; the port is not used."""
        self._check_open()
        return MemoryStream(self._service, request)

    def close(self) -> None:
        """See `Channel`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the channel is closed")
