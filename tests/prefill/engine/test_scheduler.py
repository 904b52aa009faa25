from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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


def settled(what: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if what():
            return True
        threading.Event().wait(0.01)
    return False


def job_of(scheduler: Scheduler, decoder: TorchDecoder, ids: Sequence[int], bound_nbytes: int = 1 << 20) -> PrefillJob:
    geometry = Geometry.of(decoder.spec, ElementType.F16)
    request = ScheduleRequest(geometry, len(ids) + 1, 0, CHUNK_TOKENS, WindowPolicy.ROLLING)
    place, _ = scheduler.reserve(len(ids))
    return PrefillJob(place, b"h" * 16, list(ids), build_schedule(request), SegmentQueue(bound_nbytes))


def test_a_job_yields_its_schedule_and_its_time(scheduler: Scheduler, decoder: RefusingDecoder) -> None:
    job = job_of(scheduler, decoder, range(100))
    scheduler.submit(job)
    assert tuple(ready.segment for ready in job.segments()) == job.schedule.segments
    assert job.prefill_ns > 0


def test_more_places_than_there_are_are_refused_and_come_back(scheduler: Scheduler, decoder: RefusingDecoder) -> None:
    stalled = job_of(scheduler, decoder, range(100), bound_nbytes=1)
    scheduler.submit(stalled)
    promised, wait_ns = scheduler.reserve(100)
    assert wait_ns > 0
    with pytest.raises(ProducerBusy, match="2 handoffs"):
        scheduler.reserve(100)
    scheduler.release(promised)
    _, again_ns = scheduler.reserve(1)
    assert again_ns > 0
    stalled.cancel()
    assert settled(lambda: scheduler.load == 1)
    job = job_of(scheduler, decoder, range(100))
    scheduler.submit(job)
    assert len(list(job.segments())) == len(job.schedule.segments)
    assert settled(lambda: scheduler.load == 1)


def test_the_wait_counts_everything_that_was_promised(scheduler: Scheduler) -> None:
    first, nothing = scheduler.reserve(1000)
    second, behind_first = scheduler.reserve(1)
    assert nothing == 0
    assert behind_first > 0
    scheduler.release(first)
    scheduler.release(second)
    scheduler.release(second)
    assert scheduler.load == 0


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, ValueError])
def test_refused_memory_fails_its_job_and_not_the_next(
    scheduler: Scheduler, decoder: RefusingDecoder, error: type[Exception]
) -> None:
    decoder.refuse = error
    failing = job_of(scheduler, decoder, range(50))
    scheduler.submit(failing)
    with pytest.raises(JobFailed, match=error.__name__):
        list(failing.segments())
    decoder.refuse = None
    job = job_of(scheduler, decoder, range(50))
    scheduler.submit(job)
    assert len(list(job.segments())) == len(job.schedule.segments)


def test_waiting_for_the_reader_does_not_count_as_a_slow_computation(
    scheduler: Scheduler, decoder: RefusingDecoder
) -> None:
    before = scheduler.predicted_chunk_ns()
    job = job_of(scheduler, decoder, range(100), bound_nbytes=1)
    scheduler.submit(job)
    threading.Event().wait(1.0)
    list(job.segments())
    assert job.queue.waited_s > 0.9
    # A wait of a second, had it counted, would add 0.3 x 10 ms a token, 96 ms a chunk.
    assert scheduler.predicted_chunk_ns() < before + 90e6
