"""Export: planes leave the device and wait, bounded in bytes, for the thread that seals and sends them.

The compute thread calls `SegmentExport.layer_done` after each layer; it copies each segment that is
now complete into host memory of its own (the producer's one copy) and queues it. When the bytes in
flight reach their bound the compute thread waits: memory never grows with a slow reader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from muser_prefill.errors import JobCancelled
from muser_wire.schedule import Schedule, Segment
from muser_wire.trace import now_ns, span

IN_FLIGHT_NBYTES = 32 << 20
"""Payload bytes that a handoff may hold in host memory: about 27 ms of a 10 Gbit/s link, enough to hide its jitter."""


class PlaneSource(Protocol):
    """A cache whose finished planes can be read."""

    def planes(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each `[stop - start, kv_heads, head_dim]`, in the element type of the wire."""


@dataclass(frozen=True)
class ReadySegment:
    """A segment's payload in host memory. `wait` returns once the copy from the device is complete."""

    segment: Segment
    payload: memoryview
    wait: Callable[[], None]


class SegmentQueue:
    """Segments between the compute thread and the sender, bounded in bytes.

    A segment counts from before its copy until the sender asks for the next one, that is until the
    transport has taken it. `peak_nbytes` and `waited_s` (the compute thread's) are for the log.
    """

    def __init__(self, bound_nbytes: int = IN_FLIGHT_NBYTES) -> None:
        self._bound_nbytes = bound_nbytes
        self._changed = threading.Condition()
        self._ready: deque[ReadySegment] = deque()
        self._in_flight_nbytes = 0
        self._ended = False
        self._cancelled = False
        self._error: Exception | None = None
        self.peak_nbytes = 0
        self.waited_s = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether the reader has gone."""
        return self._cancelled

    def __len__(self) -> int:
        """How many segments wait for the sender."""
        return len(self._ready)

    def reserve(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be in flight. One segment may pass alone whatever its size.

        Raises:
            JobCancelled: the reader has gone.
        """
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._fits(nbytes))
            self.waited_s += time.perf_counter() - started
            if self._cancelled:
                raise JobCancelled
            self._in_flight_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._in_flight_nbytes)

    def put(self, ready: ReadySegment) -> None:
        """Queue a segment whose bytes were reserved."""
        with self._changed:
            self._ready.append(ready)
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing more comes; with `error`, the reader gets it after what is queued."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def cancel(self) -> None:
        """Say that the reader has gone: the computation stops at its next layer, queued memory is freed."""
        with self._changed:
            self._cancelled = True
            self._ready.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[ReadySegment]:
        """Yield segments in order until the end.

        Raises:
            Exception: the one given to `end`.
            JobCancelled: `cancel` was called.
        """
        while (ready := self._take()) is not None:
            ready.wait()
            yield ready
            self._done(ready.segment.nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._in_flight_nbytes == 0 or self._in_flight_nbytes + nbytes <= self._bound_nbytes

    def _take(self) -> ReadySegment | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._cancelled)
            if self._cancelled:
                raise JobCancelled
            if self._ready:
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            return None

    def _done(self, nbytes: int) -> None:
        with self._changed:
            self._in_flight_nbytes -= nbytes
            self._changed.notify_all()


class SegmentExport:
    """Turns finished layers into queued segments, in the order of the schedule."""

    def __init__(self, schedule: Schedule, cache: PlaneSource, queue: SegmentQueue) -> None:
        self._segments = deque(schedule.segments)
        self._cache = cache
        self._queue = queue
        self._computing_ns = now_ns()

    def layer_done(self, chunk_index: int, layer: int) -> None:
        """Export every segment that became complete when `layer`'s planes of this chunk did. May wait.

        Raises:
            JobCancelled: the reader has gone; this is also how a cancel stops the computation within a layer.
        """
        if self._queue.cancelled:
            raise JobCancelled
        span("compute", layer, self._computing_ns)
        while self._segments and self._complete(self._segments[0], chunk_index, layer):
            segment = self._segments.popleft()
            self._queue.reserve(segment.nbytes)
            started_ns = now_ns()
            self._queue.put(self._copy(segment))
            span("copy", segment.index, started_ns)
        self._computing_ns = now_ns()

    @staticmethod
    def _complete(segment: Segment, chunk_index: int, layer: int) -> bool:
        return segment.chunk_index == chunk_index and segment.last_layer <= layer

    def _copy(self, segment: Segment) -> ReadySegment:
        """Return a segment in host memory: slice after slice, keys before values, unpadded [3.2]."""
        planes = [
            plane for piece in segment.slices for plane in self._cache.planes(piece.layer, piece.start, piece.stop)
        ]
        on_device = planes[0].is_cuda
        payload = torch.empty(segment.nbytes, dtype=torch.uint8, pin_memory=on_device)
        offset = 0
        for plane in planes:
            target = payload[offset : offset + plane.nbytes].view(plane.dtype).view(plane.shape)
            target.copy_(plane, non_blocking=on_device)
            offset += plane.nbytes
        memory = memoryview(payload.numpy())  # type: ignore[arg-type]  # numpy's stub hides the buffer
        return ReadySegment(segment, memory, _device_wait() if on_device else _no_wait)


def _no_wait() -> None:
    """Return at once: a copy in host memory is complete when it returns."""


def _device_wait() -> Callable[[], None]:
    """Return what waits for the copies that were just queued on the device."""
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
