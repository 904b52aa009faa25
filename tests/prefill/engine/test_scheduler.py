from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.scheduler import PrefillJob, Scheduler
from muser_prefill.errors import JobFailed, ProducerBusy
from muser_prefill.export import SegmentQueue
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule

CHUNK_TOKENS = 32


class RefusingDecoder(TorchDecoder):
    """A decoder whose memory is refused while `refuse` is set."""

    refuse: type[Exception] | None = None

    def new_cache(self, capacity: int) -> KVCache:
        if self.refuse is not None:
            raise self.refuse("cannot allocate")
        return super().new_cache(capacity)


@pytest.fixture
def decoder(tiny_llama: Path) -> RefusingDecoder:
    return RefusingDecoder(
        open_checkpoint(tiny_llama), dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu")
    )


@pytest.fixture
def scheduler(decoder: RefusingDecoder) -> Iterator[Scheduler]:
    scheduler = Scheduler(decoder, CHUNK_TOKENS, max_waiting=1)
    scheduler.start()
    yield scheduler
    scheduler.stop(10.0)


def job_of(decoder: TorchDecoder, ids: Sequence[int], bound_nbytes: int = 1 << 20) -> PrefillJob:
    geometry = Geometry.of(decoder.spec, ElementType.F16)
    request = ScheduleRequest(geometry, len(ids) + 1, 0, CHUNK_TOKENS, WindowPolicy.ROLLING)
    return PrefillJob(b"h" * 16, list(ids), build_schedule(request), SegmentQueue(bound_nbytes))


def test_a_job_yields_its_schedule_and_its_time(scheduler: Scheduler, decoder: RefusingDecoder) -> None:
    job = job_of(decoder, range(100))
    scheduler.submit(job)
    assert tuple(ready.segment for ready in job.segments()) == job.schedule.segments
    assert job.prefill_ns > 0


def test_more_jobs_than_may_wait_are_refused_and_room_comes_back(
    scheduler: Scheduler, decoder: RefusingDecoder
) -> None:
    stalled, waiting = (job_of(decoder, range(100), bound_nbytes=1) for _ in range(2))
    scheduler.submit(stalled)
    scheduler.submit(waiting)
    with pytest.raises(ProducerBusy, match="2 handoffs"):
        scheduler.submit(job_of(decoder, range(100)))
    with pytest.raises(ProducerBusy):
        scheduler.check_capacity()
    predicted = scheduler.predicted_chunk_ns()
    stalled.cancel()
    waiting.cancel()
    job = job_of(decoder, range(100))
    deadline = threading.Event()
    for _ in range(500):
        try:
            scheduler.submit(job)
            break
        except ProducerBusy:
            deadline.wait(0.01)
    assert len(list(job.segments())) == len(job.schedule.segments)
    assert predicted > scheduler.predicted_chunk_ns()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, ValueError])
def test_refused_memory_fails_its_job_and_not_the_next(
    scheduler: Scheduler, decoder: RefusingDecoder, error: type[Exception]
) -> None:
    decoder.refuse = error
    failing = job_of(decoder, range(50))
    scheduler.submit(failing)
    with pytest.raises(JobFailed, match=error.__name__):
        list(failing.segments())
    decoder.refuse = None
    job = job_of(decoder, range(50))
    scheduler.submit(job)
    assert len(list(job.segments())) == len(job.schedule.segments)


def test_waiting_for_the_reader_does_not_count_as_a_slow_computation(
    scheduler: Scheduler, decoder: RefusingDecoder
) -> None:
    before = scheduler.predicted_chunk_ns()
    job = job_of(decoder, range(100), bound_nbytes=1)
    scheduler.submit(job)
    threading.Event().wait(1.0)
    list(job.segments())
    assert job.queue.waited_s > 0.9
    # A wait of a second, had it counted, would add 0.3 x 10 ms a token, 96 ms a chunk.
    assert scheduler.predicted_chunk_ns() < before + 90e6
