"""How requests end before their time, and what an engine survives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from engine_runs import GRID, PROMPT, WAIT_S, Blocking, Box, Layered, ask, make_decoder, new_engine, run
from memory_source import MemorySource

from muser_decode.decoder import MlxDecoder
from muser_decode.engine import loop
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    Route,
    TokenEvent,
)
from muser_decode.engine.source import SlotPool
from muser_decode.errors import DecodeError, EngineStopped
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint


def test_cancel_while_decoding_ends_within_two_tokens(engine: Engine) -> None:
    box, generations = Box(), []
    seen = threading.Event()

    def sink(event: Event) -> None:
        box(event)
        if len(box.tokens) == 3 and not seen.is_set():
            seen.set()
            generations[0].cancel()

    generations.append(engine.submit(ask(new=1_000), sink))
    finished = box.end()
    assert (finished.reason, finished.generated_tokens) == (FinishReason.CANCELLED, len(box.tokens))
    assert len(box.tokens) <= 5


def test_cancel_while_prefilling_ends_within_a_chunk(engine: Engine) -> None:
    box, generations = Box(), []
    submitted = threading.Event()

    def sink(event: Event) -> None:
        box(event)
        assert submitted.wait(WAIT_S)
        generations[0].cancel()

    generations.append(engine.submit(ask(), sink))
    submitted.set()
    assert box.end().reason is FinishReason.CANCELLED
    assert [type(event) for event in box.events] == [PrefillProgress, Finished]


def test_cancel_during_a_handoff_cancels_the_source(engine: Engine, planes) -> None:
    source = MemorySource(planes, GRID, stall_at=2)
    box = Box()
    generation = engine.submit(ask(), box, source)
    assert box.until(PrefillProgress).done == GRID
    assert box.until(PrefillProgress).done == 2 * GRID
    began = time.monotonic()
    generation.cancel()
    assert box.end().reason is FinishReason.CANCELLED
    assert time.monotonic() - began < loop.IDLE_S, "cancel must wake an engine that waits"
    assert source.events == ["begin", "cancel"]
    assert source.gone.wait(WAIT_S)
    assert run(engine, ask(new=1), MemorySource(planes, GRID)).report.route is Route.REMOTE


def test_cancel_while_waiting_ends_without_work(engine: Engine, planes) -> None:
    blocking = Blocking()
    engine.submit(ask(new=1), blocking)
    assert blocking.reached.wait(WAIT_S)
    source, box = MemorySource(planes, GRID), Box()
    fillers = [Box() for _ in range(loop.DEFAULT_MAX_BATCH - 1)]
    for filler in fillers:
        engine.submit(ask(PROMPT[:3], new=1), filler)
    generation = engine.submit(ask(), box, source)
    generation.cancel()
    generation.cancel()
    blocking.go.set()
    assert box.end().reason is FinishReason.CANCELLED
    assert [type(event) for event in box.events] == [Finished]
    assert source.events == ["cancel"]
    for other in (blocking.box, *fillers):
        other.end()


def test_cancel_while_prefilling_ends_with_the_layer(layered: tuple[Engine, Layered]) -> None:
    """It comes after the second layer of the third chunk: nothing more is launched, reported or decoded."""
    engine, decoder = layered
    box, generations = Box(), []
    submitted = threading.Event()
    per_chunk = 5  # The last layer's end is the chunk's.

    def on_layer() -> None:
        if decoder.layers == 2 * per_chunk + 2:
            assert submitted.wait(WAIT_S)
            generations[0].cancel()

    decoder.on_layer = on_layer
    generations.append(engine.submit(ask(), box))
    submitted.set()
    assert box.end().reason is FinishReason.CANCELLED
    assert decoder.layers == 2 * per_chunk + 2
    assert decoder.rows == []
    assert [type(event) for event in box.events] == [PrefillProgress, PrefillProgress, Finished]
    decoder.on_layer = lambda: None
    assert len(run(engine, ask(new=2)).tokens) == 2


def test_a_step_that_fails_ends_those_in_it_and_the_engine_lives(layered: tuple[Engine, Layered], greedy) -> None:
    engine, decoder = layered
    whole = decoder.steps

    def failing(tokens, caches):
        raise MemoryError("secret")

    boxes = [Box(), Box()]
    for box in boxes:
        engine.submit(ask(new=1_000), box)
    for box in boxes:
        box.until(TokenEvent)
    decoder.steps = failing
    for box in boxes:
        failed = box.end()
        assert isinstance(failed, Failed)
        assert "MemoryError" in failed.message
        assert "secret" not in failed.message
    decoder.steps = whole
    assert run(engine, ask()).tokens == greedy
    assert engine.load == 0


def test_a_deadline_ends_an_answer_between_two_tokens(engine: Engine) -> None:
    box, generations = Box(), []
    submitted = threading.Event()

    def sink(event: Event) -> None:
        box(event)
        if len(box.tokens) == 3:
            assert submitted.wait(WAIT_S)
            generations[0].request = replace(request, deadline_s=1e-6)

    request = ask(new=1_900, deadline_s=600.0)
    generations.append(engine.submit(request, sink))
    submitted.set()
    ended = box.end()
    assert (ended.reason, ended.generated_tokens) == (FinishReason.DEADLINE, len(box.tokens))
    assert 3 <= len(box.tokens) <= 5
    assert run(engine, ask(new=2, deadline_s=600.0)).events[-1].reason is FinishReason.LENGTH


def test_a_deadline_wakes_an_engine_that_waits(engine: Engine, planes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_S", 3_600.0)
    box, source = Box(), MemorySource(planes, GRID, stall_at=1)
    engine.submit(ask(deadline_s=0.5), box, source)
    assert box.end().reason is FinishReason.DEADLINE
    assert box.tokens == []
    assert source.events == ["begin", "cancel"]


def test_a_deadline_comes_while_waiting_for_a_place_too(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), max_batch=1, deadline_s=0.2)
    engine.start()
    first, second = Box(), Box()
    engine.submit(ask(new=1_900), first)
    engine.submit(ask(new=5, deadline_s=100.0), second)
    # The server's own deadline holds for one that wants more time.
    assert first.end().reason is second.end().reason is FinishReason.DEADLINE
    assert second.events == [Finished(FinishReason.DEADLINE, 0, 0.0, 0.0)]
    assert engine.stop()


class Broken(MlxDecoder):
    """A decoder that fails on prompts that begin with token 7."""

    error: Exception = ZeroDivisionError("secret detail")

    def prefill_chunk(self, ids, cache, go_on=None) -> bool:
        if ids[0] == 7:
            raise self.error
        return super().prefill_chunk(ids, cache, go_on)


@pytest.mark.parametrize(
    ("error", "shown", "hidden"),
    [(ZeroDivisionError("secret"), "ZeroDivisionError", "secret"), (DecodeError("too large"), "too large", "\n")],
)
def test_an_error_ends_one_generation_and_the_engine_lives(
    tiny_llama: Path, greedy: list[int], error: Exception, shown: str, hidden: str
) -> None:
    def factory() -> MlxDecoder:
        decoder = Broken(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
        decoder.error = error
        return decoder

    engine = new_engine(factory)
    engine.start()
    good, bad = Box(), Box()
    engine.submit(ask(), good)
    engine.submit(ask((7, *PROMPT)), bad)
    failed = bad.end()
    assert isinstance(failed, Failed)
    assert shown in failed.message
    assert hidden not in failed.message
    good.end()
    assert good.tokens == greedy
    assert engine.healthy()
    assert engine.load == 0
    assert engine.stop()


def test_an_error_in_a_source_ends_one_generation_and_cancels_it(engine: Engine, planes, greedy) -> None:
    class Raising(MemorySource):
        def poll(self):
            raise OSError("boom")

    source = Raising(planes, GRID)
    assert isinstance(run(engine, ask(), source).events[-1], Failed)
    assert source.events == ["begin", "cancel"]
    assert run(engine, ask()).tokens == greedy


def test_a_sink_that_raises_ends_its_own_generation(engine: Engine, greedy: list[int]) -> None:
    called: list[Event] = []

    def sink(event: Event) -> None:
        called.append(event)
        raise RuntimeError("the client is gone")

    engine.submit(ask(), sink)
    assert run(engine, ask()).tokens == greedy
    assert [type(event) for event in called] == [PrefillProgress, Failed]
    assert engine.load == 0


def test_a_model_that_does_not_load_raises_in_start(tiny_llama: Path) -> None:
    def factory() -> MlxDecoder:
        raise DecodeError("no such model")

    engine = new_engine(factory)
    with pytest.raises(DecodeError, match="no such model"):
        engine.start()
    assert not engine.healthy()
    with pytest.raises(EngineStopped):
        engine.submit(ask(), Box())
    assert engine.stop()


def test_the_decoder_is_made_and_used_on_one_thread(tiny_llama: Path, planes) -> None:
    threads: set[int] = set()

    class Watching(MlxDecoder):
        def __init__(self, *args, **kwargs) -> None:
            threads.add(threading.get_ident())
            super().__init__(*args, **kwargs)

        def steps(self, tokens, caches):
            threads.add(threading.get_ident())
            return super().steps(tokens, caches)

        def prefill_chunk(self, ids, cache, go_on=None) -> bool:
            threads.add(threading.get_ident())
            return super().prefill_chunk(ids, cache, go_on)

    engine = new_engine(
        lambda: Watching(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    )
    engine.start()
    sinks: set[int] = set()
    box = Box()

    def sink(event: Event) -> None:
        sinks.add(threading.get_ident())
        box(event)

    engine.submit(ask(), sink, MemorySource(planes, GRID, fail_at=2))
    box.end()
    assert engine.stop()
    assert len(threads) == 1
    assert sinks == threads
    assert threading.get_ident() not in threads


def test_an_engine_that_was_not_started_takes_nothing(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama))
    with pytest.raises(EngineStopped):
        engine.submit(ask(), Box())
    assert not engine.healthy()
    assert engine.stop()


def test_stop_cancels_everything_in_bounded_time(tiny_llama: Path, planes) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama))
    engine.start()
    running, remote = Box(), Box()
    waiting = [Box() for _ in range(4)]
    source = MemorySource(planes, GRID, stall_at=1)
    engine.submit(ask(new=1_900), running)
    engine.submit(ask(), remote, source)
    running.until(TokenEvent)
    for box in waiting:
        engine.submit(ask(new=1_900), box)
    began = time.monotonic()
    assert engine.stop()
    assert time.monotonic() - began < WAIT_S / 2
    for box in (running, remote, *waiting):
        assert box.events[-1].reason is FinishReason.CANCELLED
        assert sum(isinstance(event, Finished | Failed) for event in box.events) == 1
    assert source.events == ["begin", "cancel"]
    with pytest.raises(EngineStopped):
        engine.submit(ask(), Box())
    assert not engine.healthy()
    assert engine.stop(), "stopping twice is no error"


def test_stop_can_let_requests_end_first(tiny_llama: Path, greedy: list[int]) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama))
    engine.start()
    box = Box()
    engine.submit(ask(), box)
    assert engine.stop(drain_s=WAIT_S)
    assert box.tokens == greedy
    assert box.events[-1].reason is FinishReason.LENGTH


def test_stop_ends_a_source_that_waits_for_a_slot(tiny_llama: Path, planes) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama))
    engine.start()
    pools: list[SlotPool] = []

    class Hoarding(MemorySource):
        def begin(self, slots: SlotPool) -> None:
            pools.append(slots)

    engine.submit(ask(), Box(), Hoarding(planes, GRID))
    while not pools:
        time.sleep(0.001)
    assert [pools[0].acquire(0.0) is not None for _ in range(2)] == [True, True]
    results: list[object] = []
    waiter = threading.Thread(target=lambda: results.append(pools[0].acquire(60.0)))
    waiter.start()
    assert engine.stop()
    waiter.join(WAIT_S)
    assert results == [None]


def test_health_follows_progress(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.last_progress
    run(engine, ask(new=2))
    assert engine.last_progress > before
    assert engine.healthy()
    monkeypatch.setattr(engine, "last_progress", time.monotonic() - loop.STALL_S)
    assert not engine.healthy()


def test_each_layer_of_a_prefill_is_progress(layered: tuple[Engine, Layered]) -> None:
    """A model whose chunk takes minutes is slow, not stuck."""
    engine, decoder = layered
    beats: list[float] = []
    decoder.on_layer = lambda: beats.append(engine.last_progress)
    run(engine, ask(PROMPT[: GRID + 1], new=1))
    assert len(beats) == 5
    assert len(set(beats)) == 5


def test_a_sleeping_engine_is_woken_by_all_that_concerns_it(
    tiny_llama: Path, planes, greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a heartbeat of an hour, only being woken lets these end: a request, a chunk, a cancellation, the stop."""
    monkeypatch.setattr(loop, "IDLE_S", 3_600.0)
    engine = new_engine(lambda: make_decoder(tiny_llama))
    engine.start()

    def fall_asleep() -> None:
        time.sleep(0.1)

    fall_asleep()
    assert run(engine, ask()).tokens == greedy
    fall_asleep()
    assert run(engine, ask(), MemorySource(planes, GRID, pause_s=0.05)).report.route is Route.REMOTE
    box = Box()
    generation = engine.submit(ask(), box, MemorySource(planes, GRID, stall_at=1))
    box.until(PrefillProgress)
    fall_asleep()
    generation.cancel()
    assert box.end().reason is FinishReason.CANCELLED
    fall_asleep()
    assert engine.stop()
