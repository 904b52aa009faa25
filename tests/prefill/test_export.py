"""What leaves the producer, when, and how many bytes wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.cache import KVCache
from muser_prefill.engine.runner import prefill
from muser_prefill.errors import JobCancelled, JobFailed
from muser_prefill.export import ReadySegment, SegmentExport, SegmentQueue
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.schedule import Schedule, ScheduleRequest, Segment, SegmentSlice, WindowPolicy, build_schedule

WAIT_S = 30.0
PROMPT_TOKENS = 2001
CHUNK_TOKENS = 2000
"""Large enough that the tiny model's six layers make two segments of one chunk."""


@pytest.fixture(scope="module")
def decoder(tiny_llama: Path) -> TorchDecoder:
    return TorchDecoder(
        open_checkpoint(tiny_llama), dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu")
    )


def schedule_for(decoder: TorchDecoder, prompt: int, chunk: int, held: int = 0) -> Schedule:
    geometry = Geometry.of(decoder.spec, ElementType.F16)
    return build_schedule(ScheduleRequest(geometry, prompt, held, chunk, WindowPolicy.ROLLING))


class Computation:
    """A prefill on its own thread, as the scheduler runs it, that counts finished layers."""

    def __init__(self, decoder: TorchDecoder, schedule: Schedule, bound_nbytes: int) -> None:
        request = schedule.request
        self.ids = [token % decoder.spec.vocab_size for token in range(request.prompt_tokens - 1)]
        self.cache = decoder.new_cache(len(self.ids))
        self.queue = SegmentQueue(bound_nbytes)
        self.layers_done: list[tuple[int, int]] = []
        export = SegmentExport(schedule, self.cache, self.queue)

        def on_layer(chunk: int, layer: int) -> None:
            self.layers_done.append((chunk, layer))
            export.layer_done(chunk, layer)

        def run() -> None:
            try:
                prefill(decoder, self.ids, self.cache, request.chunk_tokens, on_layer)
                self.queue.end()
            except JobCancelled as error:
                self.queue.end(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def check_payload(ready: ReadySegment, cache: KVCache) -> None:
    """Check a payload against the cache, plane by plane, by the layout that the protocol gives."""
    for piece in ready.segment.slices:
        half = piece.nbytes // 2
        planes = cache.planes(piece.layer, piece.start, piece.stop)
        for plane, offset in zip(planes, (piece.offset, piece.offset + half), strict=True):
            assert b"".join(ready.parts)[offset : offset + half] == plane.contiguous().numpy().tobytes()


def test_every_segment_carries_the_caches_planes_in_order(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=150, chunk=64)
    computation = Computation(decoder, schedule, 1 << 20)
    sent = []
    for ready in computation.queue:
        computation.thread.join(WAIT_S)
        check_payload(ready, computation.cache)
        sent.append(ready.segment)
    assert tuple(sent) == schedule.segments


def test_held_tokens_are_computed_and_not_sent(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=150, chunk=64, held=100)
    computation = Computation(decoder, schedule, 1 << 20)
    sent = [ready.segment for ready in computation.queue]
    assert tuple(sent) == schedule.segments
    assert sent[0].slices[0].start == 100


def test_the_first_segment_leaves_before_the_chunks_last_layer_is_computed(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, PROMPT_TOKENS, CHUNK_TOKENS)
    assert len(schedule.segments) == 2
    computation = Computation(decoder, schedule, schedule.segments[0].nbytes)
    frames = iter(computation.queue)
    first = next(frames)
    # While the reader holds the first segment the second has no room, so its layers cannot be past their export.
    computation.thread.join(0.5)
    assert first.segment.last_layer < 5
    assert computation.layers_done[-1] == (0, 5)
    assert computation.cache.length == 0
    assert [ready.segment.index for ready in frames] == [1]
    computation.thread.join(WAIT_S)
    assert computation.cache.length == CHUNK_TOKENS


def test_a_segment_is_queued_with_the_layer_that_completes_it(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, PROMPT_TOKENS, CHUNK_TOKENS)
    cache, queue = decoder.new_cache(CHUNK_TOKENS), SegmentQueue()
    export = SegmentExport(schedule, cache, queue)
    queued: list[tuple[int, int]] = []

    def on_layer(chunk: int, layer: int) -> None:
        export.layer_done(chunk, layer)
        queued.append((layer, len(queue)))

    prefill(decoder, [0] * CHUNK_TOKENS, cache, CHUNK_TOKENS, on_layer)
    # 256,000 bytes a layer: four fill a segment, and it leaves while two layers are still to come.
    assert queued == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]


def test_a_chunk_of_one_segment_leaves_after_its_last_layer(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=65, chunk=64)
    computation = Computation(decoder, schedule, 1 << 20)
    next(iter(computation.queue))
    assert computation.layers_done[-1] == (0, 5)


def test_a_reader_that_stalls_stops_the_computation_at_the_bound(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=513, chunk=32)
    per_chunk = schedule.chunks[0].nbytes
    bound = 3 * per_chunk
    computation = Computation(decoder, schedule, bound)
    deadline_s = time.monotonic() + WAIT_S
    while (3, 5) not in computation.layers_done and time.monotonic() < deadline_s:
        time.sleep(0.01)
    computation.thread.join(0.3)
    assert computation.thread.is_alive()
    assert computation.queue.peak_nbytes == bound
    # Three chunks fit; the fourth is computed and waits for room, nothing beyond it has begun.
    assert computation.layers_done[-1] == (3, 5)
    assert len(list(computation.queue)) == 16
    assert computation.queue.peak_nbytes == bound
    computation.thread.join(WAIT_S)
    assert not computation.thread.is_alive()


def test_a_cancel_stops_the_computation_within_a_layer(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=513, chunk=32)
    computation = Computation(decoder, schedule, schedule.chunks[0].nbytes)
    next(iter(computation.queue))
    computation.queue.cancel()
    layers = len(computation.layers_done)
    computation.thread.join(WAIT_S)
    assert not computation.thread.is_alive()
    # The layer that was being computed is finished, and none is begun after it.
    assert len(computation.layers_done) <= layers + 1 < 16 * 6
    with pytest.raises(JobCancelled):
        next(iter(computation.queue))


def test_planes_in_host_memory_are_not_copied(decoder: TorchDecoder) -> None:
    schedule = schedule_for(decoder, prompt=65, chunk=64)
    cache, queue = decoder.new_cache(64), SegmentQueue()
    prefill(decoder, [1] * 64, cache, 64, SegmentExport(schedule, cache, queue).layer_done)
    queue.end()
    (ready,) = queue
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in ready.parts]
    assert addresses == [plane.data_ptr() for layer in range(6) for plane in cache.planes(layer, 0, 64)]


def test_planes_that_are_not_contiguous_leave_in_the_order_of_the_wire() -> None:
    planes = torch.arange(24, dtype=torch.float16).reshape(2, 3, 4).transpose(0, 1)

    class Cache:
        def planes(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            return planes, planes + 1

    geometry = Geometry((None,), kv_heads=2, head_dim=4, element=ElementType.F16)
    schedule = build_schedule(ScheduleRequest(geometry, 4, 0, 64, WindowPolicy.ROLLING))
    queue = SegmentQueue()
    SegmentExport(schedule, Cache(), queue).layer_done(0, 0)
    queue.end()
    (ready,) = queue
    expected = [token * 4 + head * 12 + i for token in range(3) for head in range(2) for i in range(4)]
    sent = np.frombuffer(b"".join(ready.parts), np.float16)
    assert sent.tolist() == expected + [value + 1 for value in expected]


def test_a_waiting_computation_goes_on_when_half_of_the_bound_is_free() -> None:
    queue = SegmentQueue(bound_nbytes=8)
    for _ in range(8):
        queue.reserve(1)
        queue.put(ReadySegment(segment(1), (memoryview(b"x"),), lambda: None))
    waiting = threading.Thread(target=queue.reserve, args=(1,), daemon=True)
    waiting.start()
    frames = iter(queue)
    # A segment has left when the next one is asked for: after the fourth question three are gone.
    for _ in range(4):
        next(frames)
    waiting.join(0.1)
    assert waiting.is_alive()
    next(frames)
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def segment(nbytes: int) -> Segment:
    return Segment(0, 0, (SegmentSlice(0, 0, 1, 0, nbytes),))


def test_no_segment_leaves_before_its_copy_is_complete() -> None:
    queue, copied = SegmentQueue(), threading.Event()
    payload = bytearray(4)

    def wait() -> None:
        copied.wait(WAIT_S)

    queue.reserve(4)
    queue.put(ReadySegment(segment(4), (memoryview(payload),), wait))
    queue.end()
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(bytes(ready.parts[0]) for ready in queue), daemon=True)
    reader.start()
    reader.join(0.1)
    assert seen == []
    payload[:] = b"done"
    copied.set()
    reader.join(WAIT_S)
    assert seen == [b"done"]


def test_a_segment_larger_than_the_bound_passes_alone() -> None:
    queue = SegmentQueue(bound_nbytes=10)
    queue.reserve(100)
    blocked = threading.Thread(target=queue.reserve, args=(1,), daemon=True)
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    queue.put(ReadySegment(segment(100), (memoryview(bytes(100)),), lambda: None))
    queue.end()
    assert len(list(queue)) == 1
    blocked.join(WAIT_S)
    assert not blocked.is_alive()


def test_a_failure_reaches_the_reader_after_what_was_computed() -> None:
    queue = SegmentQueue()
    queue.reserve(1)
    queue.put(ReadySegment(segment(1), (memoryview(b"x"),), lambda: None))
    queue.end(JobFailed("out of memory"))
    frames = iter(queue)
    assert bytes(next(frames).parts[0]) == b"x"
    with pytest.raises(JobFailed, match="out of memory"):
        next(frames)


def test_planes_are_the_rounded_values_that_attention_read(decoder: TorchDecoder) -> None:
    cache = decoder.new_cache(10)
    prefill(decoder, list(range(10)), cache, 64, lambda chunk, layer: None)
    keys, values = cache.planes(0, 0, 10)
    assert keys.dtype == values.dtype == torch.float16
    assert np.isfinite(keys.numpy()).all()


def test_a_reader_that_takes_nothing_does_not_hold_the_computation_for_ever(
    decoder: TorchDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muser_prefill.export.STALL_S", 0.1)
    queue = SegmentQueue(bound_nbytes=10)
    queue.reserve(10)
    with pytest.raises(JobFailed, match="took nothing"):
        queue.reserve(10)
