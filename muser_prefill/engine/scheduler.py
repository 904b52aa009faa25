"""The scheduler: one thread computes, one handoff at a time, a bounded number wait.

It also keeps the measured rate, from which an accepted handoff learns how long to wait for progress.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.reuse import ComputedPrompts
from muser_prefill.engine.runner import Decoder, prefill
from muser_prefill.errors import JobCancelled, JobFailed, ProducerBusy
from muser_prefill.export import ReadySegment, SegmentExport, SegmentQueue
from muser_prefill.observer import Computed, Observer, Unobserved
from muser_wire.messages import MAX_DURATION_NS
from muser_wire.schedule import Schedule

WARM_UP_TOKENS = 128
"""Enough for a first estimate of the rate; also touches every weight before a user waits."""

MIN_MEASURED_TOKENS = 32
"""Fewer computed tokens say little about the rate."""

IDLE_S = 1.0
"""How long the thread waits for a job at most, in seconds: its heartbeat."""

PROOF_TOKENS = 8
"""Enough of a computation to see whether the device still answers."""

RATE_SMOOTHING = 0.3
"""Weight of the newest measurement in the running rate."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PrefillJob:
    """One handoff's computation. The stream reads `segments()`; when they end, `prefill_ns` is set.

    `reused_tokens` leading ones came from what earlier prompts left.

    `place` is the one that `Scheduler.reserve` gave.
    """

    place: int
    handoff_id: bytes
    token_ids: Sequence[int]
    schedule: Schedule
    queue: SegmentQueue = field(default_factory=SegmentQueue)
    prefill_ns: int = 0
    reused_tokens: int = 0

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
    """Owns the decoder and the one thread that runs it. `computed` None: no prompt is kept for the next."""

    def __init__(
        self,
        decoder: Decoder,
        chunk_tokens: int,
        max_waiting: int,
        computed: ComputedPrompts | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or Unobserved()
        self._computed = computed
        self._decoder = decoder
        self._chunk_tokens = chunk_tokens
        self._jobs: queue.Queue[PrefillJob | None] = queue.Queue()
        self._lock = threading.Lock()
        self._max_jobs = max_waiting + 1
        self._places = itertools.count()
        self._pending: dict[int, int] = {}
        self._seconds_per_token = 0.0
        self._thread = threading.Thread(target=self._run, name="prefill-compute", daemon=True)
        self._is_doubtful = False
        self.last_progress = time.monotonic()
        """Monotonic time, in seconds, at which the thread last finished a layer or found nothing to do."""

    def start(self) -> None:
        """Measure a first rate, then accept jobs."""
        spec = self._decoder.spec
        ids = [token % spec.vocab_size for token in range(min(WARM_UP_TOKENS, spec.max_positions))]
        for _ in range(2):
            started = time.perf_counter()
            prefill(self._decoder, ids, self._decoder.new_cache(len(ids)), self._chunk_tokens, _ignore)
            self._seconds_per_token = (time.perf_counter() - started) / len(ids)
        self.last_progress = time.monotonic()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the jobs that it already has; wait at most `timeout_s` seconds."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def load(self) -> int:
        """Handoffs that compute, wait, or have been promised a place."""
        return len(self._pending)

    def reserve(self, tokens: int) -> tuple[int, int]:
        """Return a place in the queue for a prompt of `tokens`, and how long it may have to wait, in nanoseconds.

        The place is taken from now on: what is promised to one handoff is part of the next one's wait.

        Raises:
            ProducerBusy: too many have one already.
        """
        with self._lock:
            if len(self._pending) >= self._max_jobs:
                raise ProducerBusy(f"{len(self._pending)} handoffs are computing or waiting")
            wait_ns = self._wait_ns()
            place = next(self._places)
            self._pending[place] = tokens
            return place, wait_ns

    def release(self, place: int) -> None:
        """Give back a place that is not used; harmless when its job has ended."""
        with self._lock:
            self._pending.pop(place, None)

    def submit(self, job: PrefillJob) -> None:
        """Queue a job at its place."""
        self._jobs.put(job)

    def predicted_wait_ns(self) -> int:
        """Return how long a handoff that is opened now may have to wait, in nanoseconds."""
        with self._lock:
            return self._wait_ns()

    def _wait_ns(self) -> int:
        return min(MAX_DURATION_NS, int(sum(self._pending.values()) * self._seconds_per_token * 1e9))

    def predicted_chunk_ns(self) -> int:
        """Return how long a whole chunk is expected to take, in nanoseconds."""
        with self._lock:
            return max(1, int(self._chunk_tokens * self._seconds_per_token * 1e9))

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                self._beat()
                continue
            if job is None:
                return
            self._serve(job)
            # While the thread waits, no name of its own may hold on to a job: gigabytes hang on it.
            del job
            self._beat()

    def _beat(self) -> None:
        """Note that the thread gets on. After a failure the device must first show that it still computes.

        A device that has failed for good fails every job at once, or none of them ever ends: neither is progress.
        """
        if self._is_doubtful:
            try:
                self._prove()
            except Exception as error:  # outermost: the thread goes on, and tries again at its next heartbeat
                _log.warning("device_failed error=%s", type(error).__name__)
                return
            self._is_doubtful = False
        self.last_progress = time.monotonic()

    def _prove(self) -> None:
        """Compute a few positions and read one back, which waits for the device."""
        spec = self._decoder.spec
        ids = [token % spec.vocab_size for token in range(min(PROOF_TOKENS, spec.max_positions))]
        cache = self._decoder.new_cache(len(ids))
        prefill(self._decoder, ids, cache, self._chunk_tokens, _ignore)
        cache.planes(0, 0, 1)[0].cpu()

    def _serve(self, job: PrefillJob) -> None:
        try:
            cache = self._compute(job)
            job.queue.end()
            self._keep(job, cache)
        except JobCancelled:
            _log.info("prefill_cancelled handoff=%s", job.handoff_id.hex())
            job.queue.end(JobCancelled())
        except Exception as error:  # outermost: one job's fault, out of memory included, must not end the thread
            _log.exception("prefill_failed handoff=%s", job.handoff_id.hex())
            self._is_doubtful = True
            job.queue.end(JobFailed(f"prefill failed: {type(error).__name__}"))
        finally:
            self.release(job.place)

    def _compute(self, job: PrefillJob) -> KVCache:
        started = time.perf_counter()
        cache = self._decoder.new_cache(len(job.token_ids))
        held_tokens = self._computed.load(job.token_ids, cache) if self._computed else 0
        job.reused_tokens = held_tokens
        export = SegmentExport(job.schedule, cache, job.queue)
        try:
            self._export_held(job, held_tokens, export)
            prefill(self._decoder, job.token_ids, cache, self._chunk_tokens, self._noted(export.layer_done))
        except JobCancelled:
            self._keep(job, cache)
            raise
        elapsed = time.perf_counter() - started
        job.prefill_ns = int(elapsed * 1e9)
        if len(job.token_ids) - held_tokens >= MIN_MEASURED_TOKENS:
            self._learn((elapsed - job.queue.waited_s) / (len(job.token_ids) - held_tokens))
        self._log_done(job, held_tokens, elapsed)
        self._observer.computed(Computed(len(job.token_ids), held_tokens, elapsed, job.queue.waited_s))
        return cache

    def _export_held(self, job: PrefillJob, held_tokens: int, export: SegmentExport) -> None:
        """Send the chunks that need no computation. One that is held in part goes as its layers are completed."""
        for chunk in job.schedule.chunks:
            if chunk.stop <= held_tokens:
                for layer in range(len(self._decoder.spec.layers)):
                    export.layer_done(chunk.index, layer)

    def _noted(self, layer_done: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return `layer_done` that also notes the thread's progress."""

        def noted(chunk_index: int, layer: int) -> None:
            layer_done(chunk_index, layer)
            self.last_progress = time.monotonic()

        return noted

    def _keep(self, job: PrefillJob, cache: KVCache) -> None:
        """Keep what was computed for later prompts. The handoff has ended by then, whatever happens here."""
        if self._computed is None:
            return
        try:
            self._computed.save(job.token_ids, cache)
        except (MemoryError, RuntimeError):
            # torch raises both for memory that it cannot have; the next prompt is computed anew.
            _log.exception("keep_failed handoff=%s", job.handoff_id.hex())

    @staticmethod
    def _log_done(job: PrefillJob, held_tokens: int, elapsed: float) -> None:
        _log.info(
            "prefill_done handoff=%s tokens=%d held_tokens=%d seconds=%.3f waited_s=%.3f peak_in_flight_nbytes=%d",
            job.handoff_id.hex(),
            len(job.token_ids),
            held_tokens,
            elapsed,
            job.queue.waited_s,
            job.queue.peak_nbytes,
        )

    def _learn(self, seconds_per_token: float) -> None:
        with self._lock:
            self._seconds_per_token += RATE_SMOOTHING * (seconds_per_token - self._seconds_per_token)


def _ignore(chunk_index: int, layer: int) -> None:
    """Do nothing with a finished layer of the warm-up."""
