"""Several requests at once: steps, places, the queue, memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import GRID, PROMPT, WAIT_S, Blocking, Box, Layered, ask, make_decoder, new_engine, run
from memory_source import MemorySource

from muser_decode.engine import floor, loop
from muser_decode.engine.loop import Engine, Submission
from muser_decode.engine.request import (
    Event,
    Finished,
    FinishReason,
    PrefillProgress,
    Route,
    TokenEvent,
)
from muser_decode.errors import EngineBusy, RequestInvalid


def test_handoffs_side_by_side_share_the_slots(engine: Engine, planes, greedy: list[int]) -> None:
    boxes = [Box() for _ in range(4)]
    sources = [MemorySource(planes, GRID) for _ in boxes]
    for box, source in zip(boxes, sources, strict=True):
        engine.submit(ask(), box, source)
    for box in boxes:
        box.end()
        assert box.tokens == greedy
        assert box.report.route is Route.REMOTE


def test_a_seeded_answer_does_not_depend_on_who_else_is_served(engine: Engine) -> None:
    request = ask(temperature=1.0, top_p=0.9, seed=11)
    alone = run(engine, request).tokens
    boxes = [Box() for _ in range(3)]
    others = [ask(PROMPT[:9], temperature=1.0, seed=1), request, ask(PROMPT[5:40], temperature=0.8)]
    for box, other in zip(boxes, others, strict=True):
        engine.submit(other, box)
    for box in boxes:
        box.end()
    assert boxes[1].tokens == alone
    assert len(set(alone)) > 3


def test_a_long_prompt_does_not_stop_others(engine: Engine) -> None:
    """Between two chunks of the long prompt the short one gets a token: neither waits for the other's end."""
    order: list[str] = []
    short, long = Box(), Box()
    begun = threading.Event()

    def long_sink(event: Event) -> None:
        order.append("L")
        begun.set()
        long(event)

    def short_sink(event: Event) -> None:
        order.append("s")
        short(event)

    engine.submit(ask(tuple((PROMPT * 10)[:640]), new=1), long_sink)
    assert begun.wait(WAIT_S)
    engine.submit(ask(PROMPT[:3], new=10), short_sink)
    short.end()
    long.end()
    first, last = order.index("s"), len(order) - 1 - order[::-1].index("s")
    between = order[first:last]
    assert max(len(stretch) for stretch in "".join(between).split("s")) <= 1
    assert order[last + 1 :].count("L") > 1, "the long one was still busy when the short one ended"


def test_the_queue_is_bounded_and_opens_again(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), max_queue=2)
    engine.start()
    blocking = Blocking()
    engine.submit(ask(new=1), blocking)
    assert blocking.reached.wait(WAIT_S)
    boxes = [Box() for _ in range(loop.DEFAULT_MAX_BATCH + 1)]
    for box in boxes:
        engine.submit(ask(PROMPT[:4], new=1), box)
    with pytest.raises(EngineBusy):
        engine.submit(ask(), Box())
    blocking.go.set()
    for box in (blocking.box, *boxes):
        assert isinstance(box.end(), Finished)
    assert len(run(engine, ask(new=1)).tokens) == 1
    assert engine.load == 0
    assert engine.stop()


def test_several_are_taken_together_or_not_at_all(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), max_batch=2, max_queue=2)
    engine.start()
    assert engine.places == 4
    blocking = Blocking()
    engine.submit(ask(new=1), blocking)
    assert blocking.reached.wait(WAIT_S)
    refused = [Box() for _ in range(4)]
    with pytest.raises(EngineBusy):
        engine.submit_all([Submission(ask(PROMPT[:4], new=1), box) for box in refused])
    with pytest.raises(RequestInvalid):
        engine.submit_all([Submission(ask(PROMPT[:4], new=1), refused[0]), Submission(ask((), new=1), refused[1])])
    assert engine.load == 1
    boxes = [Box() for _ in range(3)]
    generations = engine.submit_all([Submission(ask(PROMPT[:4], new=1), box) for box in boxes])
    assert (len(generations), engine.load) == (3, 4)
    blocking.go.set()
    for box in (blocking.box, *boxes):
        assert isinstance(box.end(), Finished)
    assert [box.events for box in refused] == [[], [], [], []]
    assert engine.stop()


def test_a_waiting_source_does_not_stop_others(engine: Engine, planes, greedy: list[int]) -> None:
    stalled, box = MemorySource(planes, GRID, stall_at=1), Box()
    generation = engine.submit(ask(), box, stalled)
    box.until(PrefillProgress)
    assert run(engine, ask()).tokens == greedy
    generation.cancel()
    box.end()


def test_answers_in_one_batch_are_those_alone(engine: Engine, planes) -> None:
    """Greedy and seeded, prefilled here and handed off, joining at different times."""
    requests = [
        ask(PROMPT[:3], new=60),
        ask(PROMPT, new=40, temperature=1.0, seed=8),
        ask(PROMPT[:33], new=50, temperature=0.7, top_p=0.9, frequency_penalty=1.0, seed=9),
        ask(new=45),
        ask(PROMPT[20:], new=30, temperature=1.2, min_p=0.05, seed=10),
    ]
    alone = [run(engine, request).tokens for request in requests]
    boxes = [Box() for _ in requests]
    for index, (request, box) in enumerate(zip(requests, boxes, strict=True)):
        source = MemorySource(planes, GRID) if request.prompt_ids == PROMPT else None
        engine.submit(request, box, source)
        if index % 2:
            box.until(TokenEvent)
    for box in boxes:
        box.end()
    assert [box.tokens for box in boxes] == alone
    assert [box.report.route for box in boxes].count(Route.REMOTE) == 2


def test_all_that_decode_share_each_step(layered: tuple[Engine, Layered]) -> None:
    engine, decoder = layered
    boxes = [Box() for _ in range(4)]
    for box in boxes:
        engine.submit(ask(PROMPT[:3], new=100), box)
    for box in boxes:
        box.end()
    assert max(decoder.rows) == 4
    # One after the other they would take 400 steps.
    assert len(decoder.rows) < 130


def test_no_more_than_the_batch_s_size_run_at_once(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), max_batch=2)
    engine.start()
    blocking = Blocking()
    engine.submit(ask(new=1), blocking)
    assert blocking.reached.wait(WAIT_S)
    order: list[int] = []
    boxes = [Box() for _ in range(3)]
    for index, box in enumerate(boxes):

        def sink(event: Event, index: int = index, box: Box = box) -> None:
            order.append(index)
            box(event)

        engine.submit(ask(PROMPT[:2], new=30), sink)
    blocking.go.set()
    for box in boxes:
        box.end()
    # The third begins when the first has ended.
    assert order.index(2) > len(order) - 1 - order[::-1].index(0)
    assert engine.stop()


def cache_of(positions: int) -> int:
    """Bytes of the tiny llama's cache, its arithmetic written down again: 6 layers, 2 heads of 16 in float32."""
    return 6 * 2 * 2 * 16 * 4 * (512 * -(-positions // 512))


def test_a_request_that_never_fits_is_refused_by_name(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), memory_nbytes=cache_of(512))
    engine.start()
    assert engine.context_tokens == 512
    with pytest.raises(RequestInvalid, match=r"70 prompt tokens and 443 of an answer need 2 MB .* 1 MB .--memory-mb"):
        engine.submit(ask(new=443), Box())
    assert len(run(engine, ask(new=442, stop=frozenset(range(512)))).tokens) == 0
    assert engine.load == 0
    assert engine.stop()


def test_a_request_waits_for_memory_and_not_for_a_place(tiny_llama: Path) -> None:
    """Two fit at a time; the third begins when one has ended, and one that needs less does not overtake it."""
    engine = new_engine(lambda: make_decoder(tiny_llama), memory_nbytes=cache_of(1024) + cache_of(512))
    engine.start()
    blocking = Blocking()
    engine.submit(ask(new=1), blocking)
    assert blocking.reached.wait(WAIT_S)
    boxes, order = [Box() for _ in range(3)], []
    for index, (box, new) in enumerate(zip(boxes, (600, 600, 20), strict=True)):

        def sink(event: Event, index: int = index, box: Box = box) -> None:
            order.append(index)
            box(event)

        engine.submit(ask(PROMPT[:4], new=new), sink)
    blocking.go.set()
    for box in boxes:
        assert box.end().reason is FinishReason.LENGTH
    assert order.index(1) > len(order) - 1 - order[::-1].index(0)
    assert order.index(2) > order.index(1)
    assert engine.load == 0
    assert engine.stop()


def test_an_answer_without_a_limit_goes_on_as_memory_allows(
    tiny_llama: Path, planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of 100 tokens here: to the limit when there is memory, and cut where there is none."""
    monkeypatch.setattr(floor, "OPEN_TOKENS", 100)
    engine = new_engine(lambda: make_decoder(tiny_llama), memory_nbytes=cache_of(1_024))
    engine.start()
    whole = run(engine, ask(PROMPT[:4], new=350))
    open_ended = run(engine, replace(ask(PROMPT[:4], new=350), open_ended=True))
    assert open_ended.tokens == whole.tokens
    assert len(whole.tokens) == 350
    # One that waits for its handoff holds half of the memory: 70 + 400 tokens lie in 512 positions.
    held, cut, source = Box(), Box(), MemorySource(planes, GRID, stall_at=0)
    generation = engine.submit(ask(new=400), held, source)
    engine.submit(replace(ask(PROMPT[:4], new=900), open_ended=True), cut)
    assert cut.end().reason is FinishReason.LENGTH
    # 4 + 500 tokens lie in the other 512; for 600 there is no memory.
    assert len(cut.tokens) == 500
    generation.cancel()
    held.end()
    assert engine.stop()


def test_cancelling_gives_memory_back(tiny_llama: Path) -> None:
    engine = new_engine(lambda: make_decoder(tiny_llama), memory_nbytes=cache_of(512))
    engine.start()
    for _ in range(3):
        box = Box()
        generation = engine.submit(ask(PROMPT[:4], new=500), box)
        box.until(TokenEvent)
        generation.cancel()
        assert box.end().reason is FinishReason.CANCELLED
    assert len(run(engine, ask(new=2)).tokens) == 2
    assert engine.stop()
