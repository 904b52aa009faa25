"""The scheduler: one thread computes, one handoff at a time, a bounded number wait.

It also keeps the measured rate, from which an accepted handoff learns how long to wait for progress.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.runner import prefill
from muser_prefill.errors import JobCancelled, JobFailed, ProducerBusy
from muser_prefill.export import ReadySegment, SegmentExport, SegmentQueue
from muser_wire.schedule import Schedule

WARM_UP_TOKENS = 128
"""Enough for a first estimate of the rate; also touches every weight before a user waits."""

RATE_SMOOTHING = 0.3
"""Weight of the newest measurement in the running rate."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PrefillJob:
    """One handoff's computation. The stream reads `segments()`; when they end, `prefill_ns` is set."""

    handoff_id: bytes
    token_ids: Sequence[int]
    schedule: Schedule
    queue: SegmentQueue = field(default_factory=SegmentQueue)
    prefill_ns: int = 0

    def segments(self) -> Iterator[ReadySegment]:
        """Yield finished segments in the order of the schedule.

        Raises:
            PrefillError: the computation failed, or was cancelled.
        """
        return iter(self.queue)

    def cancel(self) -> None:
        """Stop the computation within one layer; harmless when it has ended."""
        self.queue.cancel()


class Scheduler:
    """Owns the decoder and the one thread that runs it."""

    def __init__(self, decoder: TorchDecoder, chunk_tokens: int, max_waiting: int) -> None:
        self._decoder = decoder
        self._chunk_tokens = chunk_tokens
        self._jobs: queue.Queue[PrefillJob | None] = queue.Queue()
        self._lock = threading.Lock()
        self._max_jobs = max_waiting + 1
        self._pending: dict[int, int] = {}
        self._seconds_per_token = 0.0
        self._thread = threading.Thread(target=self._run, name="prefill-compute", daemon=True)

    def start(self) -> None:
        """Measure a first rate, then accept jobs."""
        spec = self._decoder.spec
        ids = [token % spec.vocab_size for token in range(min(WARM_UP_TOKENS, spec.max_positions))]
        for _ in range(2):
            started = time.perf_counter()
            prefill(self._decoder, ids, self._decoder.new_cache(len(ids)), self._chunk_tokens, _ignore)
            self._seconds_per_token = (time.perf_counter() - started) / len(ids)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the jobs that it already has; wait at most `timeout_s` seconds."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check_capacity(self) -> None:
        """Raise when one more job would have to wait behind too many.

        Raises:
            ProducerBusy: it would.
        """
        with self._lock:
            self._check_capacity()

    def submit(self, job: PrefillJob) -> None:
        """Queue a job.

        Raises:
            ProducerBusy: too many wait already.
        """
        with self._lock:
            self._check_capacity()
            self._pending[id(job)] = len(job.token_ids)
        self._jobs.put(job)

    def _check_capacity(self) -> None:
        if len(self._pending) >= self._max_jobs:
            raise ProducerBusy(f"{len(self._pending)} handoffs are computing or waiting")

    def predicted_chunk_ns(self) -> int:
        """Return how long the first chunk of a new job may take: what waits before it, and one chunk."""
        with self._lock:
            tokens = sum(self._pending.values()) + self._chunk_tokens
            return max(1, int(tokens * self._seconds_per_token * 1e9))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._compute(job)
                job.queue.end()
            except JobCancelled:
                _log.info("prefill_cancelled handoff=%s", job.handoff_id.hex())
                job.queue.end(JobCancelled())
            except Exception as error:  # outermost: one job's fault, out of memory included, must not end the thread
                _log.exception("prefill_failed handoff=%s", job.handoff_id.hex())
                job.queue.end(JobFailed(f"prefill failed: {type(error).__name__}"))
            finally:
                with self._lock:
                    del self._pending[id(job)]

    def _compute(self, job: PrefillJob) -> None:
        started = time.perf_counter()
        cache = self._decoder.new_cache(len(job.token_ids))
        export = SegmentExport(job.schedule, cache, job.queue)
        prefill(self._decoder, job.token_ids, cache, self._chunk_tokens, export.layer_done)
        elapsed = time.perf_counter() - started
        job.prefill_ns = int(elapsed * 1e9)
        self._learn((elapsed - job.queue.waited_s) / len(job.token_ids))
        _log.info(
            "prefill_done handoff=%s tokens=%d seconds=%.3f waited_s=%.3f peak_in_flight_nbytes=%d",
            job.handoff_id.hex(),
            len(job.token_ids),
            elapsed,
            job.queue.waited_s,
            job.queue.peak_nbytes,
        )

    def _learn(self, seconds_per_token: float) -> None:
        with self._lock:
            self._seconds_per_token += RATE_SMOOTHING * (seconds_per_token - self._seconds_per_token)


def _ignore(chunk_index: int, layer: int) -> None:
    """Do nothing with a finished layer of the warm-up."""
