from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from memory_source import MemorySource

from muser_decode.decoder import MlxDecoder
from muser_decode.engine import floor, loop
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillProgress,
    Route,
    RouteReport,
    SamplingParams,
    TokenEvent,
)
from muser_decode.engine.source import SlotPool, SourceDone
from muser_decode.errors import DecodeError, EngineBusy, EngineStopped, RequestInvalid
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint

GRID = 16
PROMPT = tuple(np.random.default_rng(2).integers(0, 512, 70).tolist())
TOKENS = len(PROMPT) - 1
CHUNKS = 5
NEW = 12
WAIT_S = 20.0
SLOT_NBYTES = 6 * 2 * GRID * 2 * 16 * 2


class Box:
    """A sink that other threads can wait on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._queue.put(event)

    def until(self, kind: type) -> Event:
        """Wait for the next event of a kind."""
        while True:
            event = self._queue.get(timeout=WAIT_S)
            if isinstance(event, kind):
                return event

    def end(self) -> Event:
        return self.until(Finished | Failed)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def report(self) -> RouteReport:
        (report,) = [event for event in self.events if isinstance(event, RouteReport)]
        return report


def make_decoder(path: Path) -> MlxDecoder:
    return MlxDecoder(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


@pytest.fixture(scope="module")
def planes(tiny_llama: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a producer would send for PROMPT: computed before any engine runs, by a decoder of its own."""
    decoder = make_decoder(tiny_llama)
    cache = decoder.new_cache()
    for start in range(0, TOKENS, GRID):
        decoder.prefill_chunk(PROMPT[start : min(TOKENS, start + GRID)], cache)
    pairs = [cache.planes(layer, 0, TOKENS) for layer in range(6)]
    return [tuple(np.array(mx.contiguous(x).view(mx.uint16)) for x in pair) for pair in pairs]


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    engine = new_engine(lambda: make_decoder(tiny_llama))
    engine.start()
    yield engine
    assert engine.stop()


def new_engine(factory: Callable[[], MlxDecoder], max_queue: int = 8, **sizes: Any) -> Engine:
    return Engine(factory, chunk_tokens=GRID, max_queue=max_queue, staging_nbytes=SLOT_NBYTES, **sizes)


def ask(
    prompt: tuple[int, ...] = PROMPT,
    new: int = NEW,
    stop: frozenset[int] = frozenset(),
    deadline_s: float | None = None,
    **sampling,
):
    return GenerationRequest("r", prompt, new, SamplingParams(**sampling), stop, deadline_s=deadline_s)


def run(engine: Engine, request: GenerationRequest, source=None, reason: str = "") -> Box:
    box = Box()
    engine.submit(request, box, source, reason)
    box.end()
    return box


@pytest.fixture(scope="module")
def greedy(tiny_llama: Path) -> list[int]:
    """The greedy answer, from a decoder alone, one token at a time, without the engine."""
    decoder = make_decoder(tiny_llama)
    cache = decoder.new_cache()
    for start in range(0, TOKENS, GRID):
        decoder.prefill_chunk(PROMPT[start : min(TOKENS, start + GRID)], cache)
    tokens = [PROMPT[-1]]
    for _ in range(NEW):
        tokens.append(int(mx.argmax(decoder.step(mx.array(tokens[-1]), cache)).item()))
    assert len(set(tokens[1:])) > 3, "a model that repeats itself would hide errors"
    return tokens[1:]


def test_a_local_run_reports_in_order(engine: Engine, greedy: list[int]) -> None:
    box = run(engine, ask(), reason="no producer")
    progress = [event for event in box.events if isinstance(event, PrefillProgress)]
    assert progress == [PrefillProgress(done, TOKENS) for done in (16, 32, 48, 64, 69)]
    assert box.tokens == greedy
    assert (box.report.route, box.report.reason) == (Route.LOCAL, "no producer")
    assert (box.report.local_tokens, box.report.remote_tokens) == (TOKENS, 0)
    kinds = [type(event) for event in box.events]
    assert kinds == [PrefillProgress] * CHUNKS + [RouteReport] + [TokenEvent] * NEW + [Finished]
    finished = box.events[-1]
    assert (finished.reason, finished.generated_tokens) == (FinishReason.LENGTH, NEW)
    assert 0 < box.report.prefill_s < finished.first_token_s < WAIT_S
    assert finished.decode_s > 0


@pytest.mark.parametrize("tokens", [1, 2, GRID, GRID + 1, GRID + 2])
def test_prompts_around_the_grid(engine: Engine, tiny_llama: Path, tokens: int) -> None:
    box = run(engine, ask(PROMPT[:tokens], new=1))
    assert len(box.tokens) == 1
    assert box.report.local_tokens == tokens - 1


def test_a_remote_run_equals_a_local_one(engine: Engine, planes, greedy: list[int]) -> None:
    source = MemorySource(planes, GRID)
    box = run(engine, ask(), source)
    assert box.tokens == greedy
    report = box.report
    assert (report.route, report.reason, report.remote_tokens, report.local_tokens) == (Route.REMOTE, "", TOKENS, 0)
    assert (report.wire_s, report.segments_verified, report.payload_nbytes) == (0.5, CHUNKS, 1234)
    assert report.handoff_id == "h1"
    assert source.events == ["begin"]


@pytest.mark.parametrize("fail_at", range(CHUNKS))
def test_a_source_that_fails_at_any_chunk_changes_no_token(engine: Engine, planes, greedy, fail_at: int) -> None:
    box = run(engine, ask(), MemorySource(planes, GRID, fail_at=fail_at), reason="not used")
    assert box.tokens == greedy
    report = box.report
    assert report.route is (Route.SALVAGED if fail_at else Route.LOCAL)
    assert report.reason == "producer_lost"
    assert (report.remote_tokens, report.local_tokens) == (fail_at * GRID, TOKENS - fail_at * GRID)
    assert (report.segments_verified, report.payload_nbytes) == (fail_at, 100 * fail_at)


def test_local_prefill_goes_on_to_the_next_boundary_of_the_grid(engine: Engine, planes, greedy: list[int]) -> None:
    """A handoff that ends off the grid, at 12; what follows is cut at 16, 32, 48 and 64, not at 12 + 16 n."""
    source = MemorySource([(k[:12], v[:12]) for k, v in planes], 12)
    box = run(engine, ask(), source)
    done = [event.done for event in box.events if isinstance(event, PrefillProgress)]
    assert done == [12, 16, 32, 48, 64, 69]
    assert box.tokens == greedy
    assert box.report.route is Route.SALVAGED
    assert box.report.reason == f"handoff ended at 12 of {TOKENS} tokens"


@pytest.mark.parametrize("shift", [1, GRID])
def test_a_chunk_that_does_not_continue_the_cache_is_never_installed(engine: Engine, planes, greedy, shift) -> None:
    source = MemorySource(planes, GRID, shift=shift)
    box = run(engine, ask(), source)
    assert box.tokens == greedy
    assert (box.report.route, box.report.remote_tokens) == (Route.LOCAL, 0)
    assert f"starts at {shift}, the cache ends at 0" in box.report.reason
    assert source.events == ["begin", "cancel"]


def test_a_handoff_that_claims_to_be_done_without_chunks_is_not_believed(engine: Engine, planes, greedy) -> None:
    class Empty(MemorySource):
        def _serve(self) -> None:
            self._say(SourceDone(0.1, 0, 0, "h2"))

    box = run(engine, ask(), Empty(planes, GRID))
    assert box.tokens == greedy
    assert (box.report.route, box.report.handoff_id) == (Route.LOCAL, "h2")


def test_a_prompt_of_one_token_needs_no_handoff(engine: Engine, planes) -> None:
    source = MemorySource(planes, GRID)
    box = run(engine, ask(PROMPT[:1], new=2), source)
    assert box.report.route is Route.LOCAL
    assert source.events == ["cancel"]


def test_staging_slots_come_back_whatever_happens(engine: Engine, planes, greedy: list[int]) -> None:
    """Two slots serve many handoffs that end in every way."""
    for turn in range(12):
        kind = turn % 3
        source = MemorySource(planes, GRID, fail_at=2 if kind == 1 else None, shift=1 if kind == 2 else 0)
        assert run(engine, ask(new=1), source).tokens == greedy[:1]
        source.cancelled.set()
        assert source.gone.wait(WAIT_S)
    assert run(engine, ask(), MemorySource(planes, GRID)).report.route is Route.REMOTE


def test_handoffs_side_by_side_share_the_slots(engine: Engine, planes, greedy: list[int]) -> None:
    boxes = [Box() for _ in range(4)]
    sources = [MemorySource(planes, GRID) for _ in boxes]
    for box, source in zip(boxes, sources, strict=True):
        engine.submit(ask(), box, source)
    for box in boxes:
        box.end()
        assert box.tokens == greedy
        assert box.report.route is Route.REMOTE


def test_a_stop_token_ends_and_is_not_emitted(engine: Engine, greedy: list[int]) -> None:
    stop = greedy[5]
    first = greedy.index(stop)
    box = run(engine, ask(stop=frozenset({stop})))
    assert box.tokens == greedy[:first]
    assert box.events[-1].reason is FinishReason.STOP
    assert box.events[-1].generated_tokens == first


def test_the_context_ends_a_generation(engine: Engine, tiny_llama: Path) -> None:
    limit = open_checkpoint(tiny_llama).spec.max_positions
    prompt = tuple((PROMPT * 40)[: limit - 3])
    box = run(engine, ask(prompt, new=50))
    assert len(box.tokens) == 3
    assert box.events[-1].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(()), "0 tokens"),
        (ask((1,) * 2_048), "2048 tokens; the model takes 1 to 2047"),
        (ask(new=0), "max_new_tokens is 0"),
        (ask((1, 512)), "outside 0 to 511"),
        (ask((-1, 1)), "outside 0 to 511"),
    ],
)
def test_requests_that_cannot_run_are_refused_at_once(engine: Engine, request_, message: str) -> None:
    with pytest.raises(RequestInvalid, match=message):
        engine.submit(request_, Box())
    assert engine.load == 0


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


@dataclass
class Blocking:
    """A sink that stops the engine's thread at the first event until it is let go."""

    box: Box = field(default_factory=Box)
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        self.box(event)
        self.reached.set()
        assert self.go.wait(WAIT_S)


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


class Layered(MlxDecoder):
    """Tells what is computed: how many layers of prefill, and how many rows each step has."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.layers = 0
        self.rows: list[int] = []
        self.on_layer: Callable[[], None] = lambda: None

    def prefill_chunk(self, ids, cache, go_on=None) -> bool:
        def counted() -> bool:
            self.layers += 1
            self.on_layer()
            return go_on is None or go_on()

        return super().prefill_chunk(ids, cache, counted)

    def steps(self, tokens, caches):
        self.rows.append(len(caches))
        return super().steps(tokens, caches)


@pytest.fixture
def layered(tiny_llama: Path) -> Iterator[tuple[Engine, Layered]]:
    made: list[Layered] = []

    def factory() -> MlxDecoder:
        made.append(Layered(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False))
        return made[0]

    engine = new_engine(factory)
    engine.start()
    yield engine, made[0]
    assert engine.stop()


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


def test_a_first_token_goes_out_before_another_step_is_launched(layered: tuple[Engine, Layered], greedy) -> None:
    engine, decoder = layered
    launched: list[int] = []
    box = Box()

    def sink(event: Event) -> None:
        if isinstance(event, TokenEvent):
            launched.append(len(decoder.rows))
        box(event)

    engine.submit(ask(), sink)
    box.end()
    assert box.tokens == greedy
    # Of every other token the next step is under way when it is read.
    assert launched == [1, *range(3, NEW + 1), NEW]


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
