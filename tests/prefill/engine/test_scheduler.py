from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    scheduler: Scheduler, decoder: RefusingDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: a token takes 1 ms, each wait for the reader 10 s, and nothing else any time."""
    clock, waits = SimpleNamespace(now_s=0.0), threading.Semaphore(0)
    compute, wait_for_room = decoder.prefill_chunk, SegmentQueue._wait_for_room

    def prefill_chunk(ids: Sequence[int], *arguments: Any, **named: Any) -> Any:
        clock.now_s += 0.001 * len(ids)
        return compute(ids, *arguments, **named)

    def waiting(queue: SegmentQueue, nbytes: int) -> None:
        clock.now_s += 10.0
        waits.release()
        wait_for_room(queue, nbytes)

    told = SimpleNamespace(perf_counter=lambda: clock.now_s, monotonic=time.monotonic)
    for module in ("muser_prefill.engine.scheduler", "muser_prefill.export"):
        monkeypatch.setattr(f"{module}.time", told)
    monkeypatch.setattr(decoder, "prefill_chunk", prefill_chunk)
    monkeypatch.setattr(SegmentQueue, "_wait_for_room", waiting)
    scheduler._seconds_per_token = 0.001
    job = job_of(scheduler, decoder, range(100), bound_nbytes=1)
    scheduler.submit(job)
    assert waits.acquire(timeout=30.0), "with room for one segment the computation never waited"
    list(job.segments())
    assert settled(lambda: scheduler.load == 0)
    assert job.queue.waited_s >= 10.0
    assert job.prefill_ns == pytest.approx(1e9 * (0.1 + job.queue.waited_s))
    # A wait, had it counted, would be 100 ms a token: 100 times what a chunk takes.
    assert scheduler.predicted_chunk_ns() == pytest.approx(1e6 * CHUNK_TOKENS)


def beats(scheduler: Scheduler) -> bool:
    """Whether the thread notes progress within a few of its heartbeats."""
    before = scheduler.last_progress
    return settled(lambda: scheduler.last_progress > before)


def test_an_idle_thread_has_a_heartbeat_and_a_layer_is_progress(
    scheduler: Scheduler, decoder: RefusingDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert beats(scheduler)
    noted: list[float] = []
    job = job_of(scheduler, decoder, range(100))
    real = SegmentQueue.put
    monkeypatch.setattr(
        SegmentQueue, "put", lambda queue, ready: (noted.append(scheduler.last_progress), real(queue, ready))
    )
    scheduler.submit(job)
    list(job.segments())
    # Each layer's segment finds the progress of the one before it.
    assert len(set(noted)) > len(noted) // 2


def test_a_thread_that_hangs_has_no_heartbeat(
    scheduler: Scheduler, decoder: RefusingDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        go_on.wait()
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(decoder, "prefill_chunk", hang)
    job = job_of(scheduler, decoder, range(100))
    scheduler.submit(job)
    assert hangs.wait(10.0)
    before = scheduler.last_progress
    # Longer than two heartbeats of an idle thread.
    assert not threading.Event().wait(2.5)
    assert scheduler.last_progress == before
    go_on.set()


def test_a_device_that_fails_for_good_is_no_progress_and_one_that_recovers_is(
    scheduler: Scheduler, decoder: RefusingDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    decoder.refuse = RuntimeError
    job = job_of(scheduler, decoder, range(100))
    scheduler.submit(job)
    with pytest.raises(JobFailed):
        list(job.segments())
    before = scheduler.last_progress
    # The thread lives and looks: it says so twice, and still none of it counts.
    assert settled(lambda: caplog.text.count("device_failed") >= 2)
    assert scheduler.last_progress == before
    decoder.refuse = None
    assert beats(scheduler)
