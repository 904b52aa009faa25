"""One request at a time: its events, its route, its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import CHUNKS, GRID, NEW, PROMPT, TOKENS, WAIT_S, Box, Layered, ask, run
from memory_source import MemorySource

from muser_decode.engine.loop import Engine
from muser_decode.engine.request import (
    Event,
    Finished,
    FinishReason,
    PrefillProgress,
    Route,
    RouteReport,
    TokenEvent,
)
from muser_decode.engine.source import SourceDone
from muser_decode.errors import RequestInvalid
from muser_wire.model.checkpoint import open_checkpoint


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
