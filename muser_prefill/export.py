"""Export: planes leave the device and wait, bounded in bytes, for the thread that seals and sends them.

The compute thread calls `SegmentExport.layer_done` after each layer; it queues each segment that is now
complete. Planes on a GPU are copied into host memory first, the producer's one copy; planes in host
memory are sealed where they lie. When the bytes in flight reach their bound the compute thread waits:
memory never grows with a slow reader.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from muser_prefill.errors import JobCancelled, JobFailed
from muser_wire.schedule import Schedule, Segment
from muser_wire.trace import now_ns, span

IN_FLIGHT_NBYTES = 32 << 20
"""Payload bytes that a handoff may hold in host memory: about 27 ms of a 10 Gbit/s link, enough to hide its jitter."""

STALL_S = 60.0
"""How long a reader may take nothing, in seconds, before its computation ends: one thread computes for everybody."""

RESUME_DIVISOR = 2
"""Once the bound was reached, the computation goes on when half of it is free again: threads that take turns segment by
segment spend a tenth of the producer's time on that."""


class PlaneSource(Protocol):
    """A cache whose finished planes can be read."""

    def planes(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each `[stop - start, kv_heads, head_dim]`, in the element type of the wire.

        They are not written again: in host memory they are read when their segment is sealed, later.
        """


@dataclass(frozen=True)
class ReadySegment:
    """A segment's payload in host memory, in parts. `wait` returns once the copy from the device is complete."""

    segment: Segment
    parts: tuple[memoryview, ...]
    wait: Callable[[], None]


class SegmentQueue:
    """Segments between the compute thread and the sender, bounded in bytes.

    A segment counts from before its copy until the sender asks for the next one, that is until the
    transport has taken it. `peak_nbytes` and `waited_s` (the compute thread's) are for the log.
    """

    def __init__(self, bound_nbytes: int = IN_FLIGHT_NBYTES) -> None:
        self._bound_nbytes = bound_nbytes
        lock = threading.Lock()
        self._room = threading.Condition(lock)
        self._news = threading.Condition(lock)
        self._ready: deque[ReadySegment] = deque()
        self._in_flight_nbytes = 0
        self._taken = 0
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
            JobFailed: it is there and takes nothing; others wait for this computation.
        """
        started = time.perf_counter()
        with self._room:
            if not self._fits(nbytes):
                self._wait_for_room(nbytes)
            self.waited_s += time.perf_counter() - started
            if self._cancelled:
                raise JobCancelled
            self._in_flight_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._in_flight_nbytes)

    def put(self, ready: ReadySegment) -> None:
        """Queue a segment whose bytes were reserved."""
        with self._news:
            self._ready.append(ready)
            self._news.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing more comes; with `error`, the reader gets it after what is queued."""
        with self._news:
            self._ended, self._error = True, error
            self._news.notify_all()

    def cancel(self) -> None:
        """Say that the reader has gone: the computation stops at its next layer, queued memory is freed."""
        with self._news:
            self._cancelled = True
            self._ready.clear()
            self._news.notify_all()
            self._room.notify_all()

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

    def _wait_for_room(self, nbytes: int) -> None:
        taken = -1
        while not self._room.wait_for(lambda: self._cancelled or (self._drained() and self._fits(nbytes)), STALL_S):
            if taken == self._taken:
                raise JobFailed(f"the reader took nothing for {STALL_S:.0f} s")
            taken = self._taken

    def _fits(self, nbytes: int) -> bool:
        return self._in_flight_nbytes == 0 or self._in_flight_nbytes + nbytes <= self._bound_nbytes

    def _drained(self) -> bool:
        return self._in_flight_nbytes <= self._bound_nbytes // RESUME_DIVISOR

    def _take(self) -> ReadySegment | None:
        with self._news:
            self._news.wait_for(lambda: self._ready or self._ended or self._cancelled)
            if self._cancelled:
                raise JobCancelled
            if self._ready:
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            return None

    def _done(self, nbytes: int) -> None:
        with self._room:
            self._in_flight_nbytes -= nbytes
            self._taken += 1
            if self._drained():
                self._room.notify_all()


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
            self._queue.put(self._export(segment))
            span("copy", segment.index, started_ns)
        self._computing_ns = now_ns()

    @staticmethod
    def _complete(segment: Segment, chunk_index: int, layer: int) -> bool:
        return segment.chunk_index == chunk_index and segment.last_layer <= layer

    def _export(self, segment: Segment) -> ReadySegment:
        """Return a segment in host memory: slice after slice, keys before values, unpadded [3.2]."""
        planes = [
            plane for piece in segment.slices for plane in self._cache.planes(piece.layer, piece.start, piece.stop)
        ]
        if planes[0].is_cuda:
            return _copied(segment, planes)
        return ReadySegment(segment, tuple(_memory(plane) for plane in planes), _no_wait)


def _memory(plane: torch.Tensor) -> memoryview:
    """Return the bytes of a plane in host memory; they are copied only where the plane is not contiguous."""
    flat = plane.contiguous().view(torch.uint8).reshape(-1)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stub hides the buffer


def _copied(segment: Segment, planes: list[torch.Tensor]) -> ReadySegment:
    """Return a segment whose planes are on their way from the device into one buffer: the producer's one copy."""
    payload = torch.empty(segment.nbytes, dtype=torch.uint8, pin_memory=True)
    offset = 0
    for plane in planes:
        target = payload[offset : offset + plane.nbytes].view(plane.dtype).view(plane.shape)
        target.copy_(plane, non_blocking=True)
        offset += plane.nbytes
    return ReadySegment(segment, (_memory(payload),), _device_wait())


def _no_wait() -> None:
    """Return at once: planes in host memory are complete when their layer is."""


def _device_wait() -> Callable[[], None]:
    """Return what waits for the copies that were just queued on the device."""
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
