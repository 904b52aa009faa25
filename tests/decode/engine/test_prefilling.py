from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from memory_source import MemorySource

from muser_decode.decoder import MlxDecoder
from muser_decode.engine import recording
from muser_decode.engine.pace import Pace
from muser_decode.engine.prefilling import Prefilling, Workshop
from muser_decode.engine.recording import Recording
from muser_decode.engine.request import Event, GenerationRequest, PrefillProgress, Route
from muser_decode.engine.source import KVSource
from muser_decode.engine.staging import Staging
from muser_decode.keeper import Keeper
from muser_wire.geometry import ElementType
from muser_wire.identities import Digest, Identities
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.numerics import budget

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


def test_while_others_get_tokens_saving_takes_turns_of_its_own(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MIN_SLAB_TOKENS", 4)
    monkeypatch.setattr(recording, "SHARED_SLAB_NBYTES", 1)
    nothing, geometry = Digest(bytes(32)), workshop.decoder.geometry
    namer = Namer(bytes(32), Identities(nothing, nothing, "kv1", "native", nothing, GRID, nothing))
    saving = replace(workshop, recording=Recording(Keeper(BlockStore(namer, geometry, 1 << 20)), geometry, GRID))
    prefilling = Prefilling(saving, GenerationRequest("r", PROMPT, 1), [].append, None, "")
    lengths = []
    while not prefilling.complete:
        assert prefilling.advance(shared=True)
        lengths.append(prefilling.cache.length)
    # Two slabs of 4 tokens for each chunk of 8: with the second one the next chunk may come.
    assert lengths == [8, 8, 16, 16, 19]


WINDOW = 24
POISON = np.uint16(0x7E00)
"""Not a number: what a handoff does not carry must never be read."""


@pytest.fixture(scope="module", params=["muse_glimmer", "gemma3"])
def sliding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxDecoder:
    path = tmp_path_factory.mktemp("sliding") / request.param
    write_tiny(request.param, path, layers=6, window=WINDOW)
    return MlxDecoder(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


def run(decoder: MlxDecoder, prompt: tuple[int, ...], grid: int, source: KVSource | None = None) -> Prefilling:
    largest = 6 * 2 * grid * decoder.geometry.plane_token_nbytes
    staging = Staging(decoder.geometry, slots=2, slot_nbytes=largest, wake=lambda: None)
    prefilling = Prefilling(Workshop(decoder, staging, grid), GenerationRequest("r", prompt, 1), [].append, source, "")
    finish(prefilling)
    return prefilling


def carried(decoder: MlxDecoder, prompt: tuple[int, ...], grid: int) -> list[tuple[np.ndarray, ...]]:
    """What a handoff carries of a prompt, read from a cache at each boundary of the grid; poison everywhere else."""
    tokens, cache = len(prompt) - 1, decoder.new_cache()
    shape = (tokens, decoder.spec.kv_heads, decoder.spec.head_dim)
    layers = [(np.full(shape, POISON), np.full(shape, POISON)) for _ in decoder.spec.layers]
    for start in range(0, tokens, grid):
        stop = min(tokens, start + grid)
        decoder.prefill_chunk(prompt[start:stop], cache)
        for index, layer in enumerate(decoder.spec.layers):
            first = start if layer.window is None else max(start, stop - layer.window)
            for into, plane in zip(layers[index], cache.planes(index, first, stop), strict=True):
                into[first:stop] = np.array(mx.contiguous(plane).view(mx.uint16))
    return layers


def greedy(decoder: MlxDecoder, prefilling: Prefilling, token: int, new: int) -> list[int]:
    tokens = []
    for _ in range(new):
        token = int(mx.argmax(decoder.step(mx.array(token), prefilling.cache)).item())
        tokens.append(token)
    return tokens


def some_prompt(tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(tokens).integers(10, 512, tokens).tolist())


@pytest.mark.parametrize(
    ("tokens", "grid", "new"),
    [
        *((tokens, 10, 30) for tokens in (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW - 10, WINDOW + 10)),
        (3 * WINDOW, 10, 120),
        (3 * WINDOW, 40, 30),
        (WINDOW + 40, 40, 30),
        (2 * 40 + 1, 40, 30),
        (3 * WINDOW + 1, WINDOW, 30),
    ],
)
def test_after_a_handoff_decoding_goes_on_as_after_local_prefill(
    sliding: MlxDecoder, tokens: int, grid: int, new: int
) -> None:
    prompt = some_prompt(tokens)
    source = MemorySource(carried(sliding, prompt, grid), grid, windows=sliding.geometry.windows, cut=9)
    local, remote = run(sliding, prompt, grid), run(sliding, prompt, grid, source)
    assert (local.report().route, remote.report().route) == (Route.LOCAL, Route.REMOTE)
    expected = greedy(sliding, local, prompt[-1], new)
    assert greedy(sliding, remote, prompt[-1], new) == expected
    assert len(set(expected)) > 8


@pytest.mark.parametrize(("grid", "fail_at"), [(10, 1), (10, 2), (30, 1)])
def test_what_a_broken_handoff_left_is_gone_on_from(sliding: MlxDecoder, grid: int, fail_at: int) -> None:
    prompt = some_prompt(90)
    planes = carried(sliding, prompt, grid)
    source = MemorySource(planes, grid, fail_at=fail_at, windows=sliding.geometry.windows, cut=9)
    salvaged = run(sliding, prompt, grid, source)
    report = salvaged.report()
    assert (report.route, report.remote_tokens) == (Route.SALVAGED, fail_at * grid)
    expected = greedy(sliding, run(sliding, prompt, grid), prompt[-1], 30)
    assert greedy(sliding, salvaged, prompt[-1], 30) == expected


UNITS_GRID = 512


@pytest.fixture(scope="module", params=["llama", "muse_glimmer", "gemma3"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MlxDecoder:
    """Its sums are as long as a real model's, so that other kernels would show."""
    path = tmp_path_factory.mktemp("wide") / request.param
    write_tiny(request.param, path, layers=4, window=200, hidden=320, ffn=640)
    return MlxDecoder(open_checkpoint(path), dtype=mx.float32, kv_element=ElementType.F16, packed=False)


class Fixed(Pace):
    """Units of the least size, whatever was measured."""

    def learn(self, tokens: int, seconds: float) -> None:
        pass


class Whole(Pace):
    """No units: whole chunks, as the grid says."""

    def unit_stop(self, start: int, stop: int, *, shared: bool) -> int:
        return stop


def paced(decoder: MlxDecoder, prompt: tuple[int, ...], pace: Pace) -> tuple[Prefilling, list[Event]]:
    events: list[Event] = []
    staging = Staging(decoder.geometry, slots=1, slot_nbytes=64, wake=lambda: None)
    workshop = Workshop(decoder, staging, UNITS_GRID, pace=pace)
    prefilling = Prefilling(workshop, GenerationRequest("r", prompt, 1), events.append, None, "")
    finish(prefilling)
    return prefilling, events


@pytest.mark.parametrize("tokens", [300, 512, 1_000])
def test_units_within_a_chunk_change_nothing(wide: MlxDecoder, tokens: int) -> None:
    prompt = some_prompt(tokens + 1)
    units, events = paced(wide, prompt, Fixed())
    whole, _ = paced(wide, prompt, Whole())
    stops = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert stops == [*range(128, tokens - 64, 128), tokens]
    for layer, spec in enumerate(wide.spec.layers):
        first = 0 if spec.window is None else max(0, tokens - spec.window)
        for ours, theirs in zip(
            units.cache.planes(layer, first, tokens), whole.cache.planes(layer, first, tokens), strict=True
        ):
            difference = mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32))
            assert float(mx.max(difference)) <= budget("planes_f16_kv") * float(mx.max(mx.abs(theirs)))
    expected = greedy(wide, whole, prompt[-1], 30)
    assert greedy(wide, units, prompt[-1], 30) == expected
    assert len(set(expected)) > 5


def test_a_prefill_that_is_told_to_stop_keeps_its_units(wide: MlxDecoder) -> None:
    layers = [0]

    def go_on() -> bool:
        layers[0] += 1
        return layers[0] < 8

    events: list[Event] = []
    staging = Staging(wide.geometry, slots=1, slot_nbytes=64, wake=lambda: None)
    workshop = Workshop(wide, staging, UNITS_GRID, pace=Fixed())
    request = GenerationRequest("r", some_prompt(500), 1)
    prefilling = Prefilling(workshop, request, events.append, None, "", go_on=go_on)
    for _ in range(3):
        prefilling.advance()
    # Three of four layers are asked about; the eighth asked is the second of the third unit.
    assert (layers[0], prefilling.cache.length) == (8, 256)
    assert events == [PrefillProgress(128, 499), PrefillProgress(256, 499)]
