"""The wire hides behind the computation: what is computed has arrived before the next thing is computed [4.6].

Nothing is timed: the computation waits for the consumer, and a wire that held something back would stop it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from bench.synthetic import MemoryCache, MemoryDecoder, PlaneMemory, Shape, Sink, Source
from muser_wire.handoff import ConsumerHandoff, SegmentVerified
from muser_wire.schedule import Schedule, ScheduleRequest, WindowPolicy, build_schedule

SHAPE = Shape(layers=4, kv_heads=2, head_dim=128, chunk_tokens=1024)
"""A layer of a chunk is one segment of 1 MiB."""
CHUNKS = 3
PROMPT_TOKENS = CHUNKS * 1024 + 1
WAIT_S = 30.0


class Arrivals:
    """How many segments the consumer has verified, and a way to wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.verified = 0

    def add(self) -> None:
        with self._changed:
            self.verified += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.verified >= count, WAIT_S)


class GatedDecoder(MemoryDecoder):
    """Finishes a layer only when the consumer has everything that was finished before it."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(SHAPE, PlaneMemory(SHAPE, 64 << 20))
        self.arrivals = arrivals
        self.layers_done = 0
        self.is_gated = False
        self.late: list[int] = []

    def prefill_chunk(self, token_ids: Sequence[int], cache: MemoryCache, on_layer: Callable[[int], None]) -> None:
        def gated(layer: int) -> None:
            if self.is_gated and not self.arrivals.wait_for(self.layers_done):
                self.late.append(self.layers_done)
            on_layer(layer)
            if self.is_gated:
                self.layers_done += 1

        super().prefill_chunk(token_ids, cache, gated)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Counts what consumers in this process verify."""
    found, receive = Arrivals(), ConsumerHandoff.receive

    def counting(self: ConsumerHandoff, *arguments: object) -> object:
        event = receive(self, *arguments)  # type: ignore[arg-type]
        if isinstance(event, SegmentVerified):
            found.add()
        return event

    monkeypatch.setattr(ConsumerHandoff, "receive", counting)
    return found


@pytest.fixture
def joined(arrivals: Arrivals) -> Iterator[tuple[GatedDecoder, Sink]]:
    """A gated producer and its consumer, over real gRPC."""
    decoder = GatedDecoder(arrivals)
    source = Source(SHAPE, decoder=decoder)
    sink = Sink(SHAPE, source.server.control_port)
    decoder.is_gated = True
    yield decoder, sink
    sink.close()
    source.close()


def schedule() -> Schedule:
    request = ScheduleRequest(SHAPE.geometry, PROMPT_TOKENS, 0, SHAPE.chunk_tokens, WindowPolicy.ROLLING)
    return build_schedule(request)


def test_every_layer_has_arrived_before_the_next_one_is_finished(joined: tuple[GatedDecoder, Sink]) -> None:
    decoder, sink = joined
    assert len(schedule().segments) == CHUNKS * SHAPE.layers
    starts: list[int] = []
    moved = sink.handoff(PROMPT_TOKENS, lambda chunk: starts.append(chunk.start))
    assert decoder.late == []
    assert decoder.layers_done == decoder.arrivals.verified == CHUNKS * SHAPE.layers
    assert moved == schedule().payload_nbytes
    assert starts == [0, 1024, 2048]


def test_a_paced_producer_sends_everything_all_the_same(arrivals: Arrivals) -> None:
    source = Source(SHAPE, max_rate=100e6, decoder=MemoryDecoder(SHAPE, PlaneMemory(SHAPE, 64 << 20)))
    sink = Sink(SHAPE, source.server.control_port)
    assert sink.handoff(1025, lambda chunk: None) == 4 << 20
    assert arrivals.verified == 4
    sink.close()
    source.close()
