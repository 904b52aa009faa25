from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from memory_source import MemorySource

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.prefilling import Prefilling, Workshop
from muser_decode.engine.request import Event, GenerationRequest, PrefillProgress, Route
from muser_decode.engine.source import KVSource
from muser_decode.engine.staging import Staging
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint

GRID = 8
PROMPT = tuple(range(40, 60))
TOKENS = len(PROMPT) - 1


@pytest.fixture(scope="module")
def workshop(tiny_llama: Path) -> Workshop:
    decoder = MlxDecoder(open_checkpoint(tiny_llama), dtype=mx.float32, kv_element=ElementType.F16, packed=False)
    staging = Staging(decoder.geometry, slots=2, slot_nbytes=6 * 2 * GRID * 2 * 16 * 2, wake=lambda: None)
    return Workshop(decoder, staging, GRID)


Begin = Callable[..., tuple[Prefilling, list[Event]]]


@pytest.fixture
def begin(workshop: Workshop) -> Begin:
    def start(source: KVSource | None = None, prompt: tuple[int, ...] = PROMPT) -> tuple[Prefilling, list[Event]]:
        events: list[Event] = []
        request = GenerationRequest("r", prompt, 1)
        return Prefilling(workshop, request, events.append, source, "why not"), events

    return start


def finish(prefilling: Prefilling) -> None:
    while not prefilling.complete:
        prefilling.advance()


def planes(prefilling: Prefilling) -> list[tuple[np.ndarray, ...]]:
    pairs = [prefilling.cache.planes(layer, 0, TOKENS) for layer in range(6)]
    return [tuple(np.array(mx.contiguous(x).view(mx.uint16)) for x in pair) for pair in pairs]


def test_local_chunks_follow_the_grid(begin: Begin) -> None:
    prefilling, events = begin()
    lengths = []
    while not prefilling.complete:
        assert prefilling.advance()
        lengths.append(prefilling.cache.length)
    assert lengths == [8, 16, 19]
    assert events == [PrefillProgress(done, TOKENS) for done in lengths]
    report = prefilling.report()
    assert (report.route, report.reason, report.local_tokens) == (Route.LOCAL, "why not", TOKENS)


def test_the_last_token_is_held_back(begin: Begin) -> None:
    prefilling, events = begin(prompt=(5,))
    assert prefilling.complete
    assert prefilling.cache.length == 0
    assert events == []


def test_installed_planes_are_those_that_the_source_sent(begin: Begin) -> None:
    local, _ = begin()
    finish(local)
    sent = [tuple(plane ^ np.uint16(1) for plane in pair) for pair in planes(local)]
    remote, _ = begin(MemorySource(sent, GRID))
    finish(remote)
    for ours, theirs in zip(planes(remote), sent, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    assert remote.report().route is Route.REMOTE


def test_all_chunks_without_the_seal_are_not_complete(begin: Begin) -> None:
    """Only a verified seal completes a handoff; chunks installed before it stay when it fails."""
    local, _ = begin()
    finish(local)
    source = MemorySource(planes(local), GRID)
    remote, _ = begin(source)
    while remote.cache.length < TOKENS:
        remote.advance()
    assert not remote.complete
    finish(remote)
    late = MemorySource(planes(local), GRID, fail_at=2)
    salvaged, _ = begin(late)
    finish(salvaged)
    report = salvaged.report()
    assert (report.route, report.remote_tokens, report.local_tokens) == (Route.SALVAGED, 16, 3)
    for ours, theirs in zip(planes(salvaged), planes(local), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_waiting_for_a_source_is_no_progress(begin: Begin) -> None:
    local, _ = begin()
    finish(local)
    source = MemorySource(planes(local), GRID, stall_at=0)
    waiting, events = begin(source)
    assert not waiting.advance()
    assert events == []
    waiting.abandon()
    waiting.abandon()
    assert source.events == ["begin", "cancel"]
