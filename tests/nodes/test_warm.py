"""Warm equals cold: greedy tokens and planes, at every place where a prompt can go on from what is held.

Over 400 lines: one property, with all the places that it must hold at.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from local_backend import served

from muser_decode.client import Consumer, ProducerClient
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_decode.engine.recording import Recorder
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillProgress,
    Route,
    RouteReport,
    TokenEvent,
)
from muser_decode.keeper import Keeper
from muser_decode.keeping import CacheSizes, open_keeper
from muser_decode.node import DecodeNode, ServedModel
from muser_decode.producers import Producers
from muser_decode.router import RoutePolicy, Router
from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Identities
from muser_wire.kvpack.block import pack_ids
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_families import TINY_FAMILIES
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.transport.memory import MemoryChannel

CHUNK = 32
TOKENS = 120
"""Prompt tokens before the one that is held back: three whole chunks and part of a fourth."""

PROMPT = tuple(5 + (index * 37) % 200 for index in range(TOKENS + 1))
OTHER = tuple(7 + (index * 53) % 190 for index in range(60))
ANSWER = 12
PLENTY = 64 << 20
WAIT_S = 60.0
WINDOWS = {"shorter than a chunk": 20, "longer than a chunk": 48}


@dataclass
class Answer:
    """What became of one request."""

    report: RouteReport
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


def collect(events: queue.Queue[Event]) -> Answer:
    answer = Answer(RouteReport(Route.LOCAL, "none came", 0.0))
    while answer.finish is None:
        match events.get(timeout=WAIT_S):
            case TokenEvent() as event:
                answer.tokens.append(event.token_id)
            case RouteReport() as report:
                answer.report = report
            case Finished() as last:
                answer.finish = last.reason
            case Failed() as last:
                pytest.fail(last.message)
            case _:
                pass
    return answer


@dataclass
class Node:
    """A decode node on a tiny model."""

    node: DecodeNode
    keeper: Keeper | None

    def ask(self, prompt: tuple[int, ...], tokens: int = ANSWER) -> Answer:
        """Answer greedily, and wait until what was computed is saved."""
        events: queue.Queue[Event] = queue.Queue()
        self.node.submit(GenerationRequest("test", prompt, tokens), events.put)
        answer = collect(events)
        if self.keeper is not None:
            assert self.keeper.idle(WAIT_S)
        return answer

    def stored(self, ids: tuple[int, ...]) -> list[bytes]:
        """The planes of each held block of a prompt."""
        assert self.keeper is not None
        store = self.keeper.store
        fetched = [store.fetch(part.head) for part in store.match(pack_ids(ids)).blocks]
        return [bytes(item.block.payload) for item in fetched if item is not None]


def identities_of(path: Path) -> Identities:
    return node_identities(
        open_checkpoint(path), load_tokenizer(path), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=CHUNK
    )


@contextlib.contextmanager
def running(
    path: Path,
    *,
    memory: int = PLENTY,
    disk: Path | None = None,
    client: ProducerClient | None = None,
    reuse_decoded: bool = True,
) -> Iterator[Node]:
    checkpoint, identities = open_checkpoint(path), identities_of(path)
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    sizes = CacheSizes(memory, 0 if disk is None else PLENTY, disk or path, reuse_decoded)
    with open_keeper(sizes, Consumer(checkpoint.spec, identities, geometry), "f32 dense") as keeper:
        engine = Engine(
            lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
            chunk_tokens=CHUNK,
            max_queue=8,
            staging_nbytes=geometry.layer_token_nbytes * len(geometry.windows) * CHUNK,
            keeper=keeper,
        )
        model = ServedModel(
            "tiny", frozenset(), load_tokenizer(path), checkpoint.spec.max_positions, created=1, identities=identities
        )
        policy = RoutePolicy.LOCAL if client is None else RoutePolicy.REMOTE
        producers = Producers(Router(policy), [client] if client else [], geometry, CHUNK)
        engine.start()
        try:
            yield Node(DecodeNode(model, engine, producers, keeper), keeper)
        finally:
            assert engine.stop()


@contextlib.contextmanager
def producing(path: Path) -> Iterator[ProducerClient]:
    """A client of a producer of the same model, joined in memory."""
    checkpoint, identities = open_checkpoint(path), identities_of(path)
    decoder = TorchDecoder(checkpoint, dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu"))
    scheduler = Scheduler(decoder, CHUNK, 4)
    scheduler.start()
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    facts = ProducerFacts(checkpoint.spec, identities, geometry, decoder.admitted, 1, os.urandom(16))
    service = ProducerService(facts, NodeKey(Ed25519PrivateKey.generate()), scheduler)
    client = ProducerClient(MemoryChannel(service), Consumer(checkpoint.spec, identities, geometry))
    client.refresh()
    yield client
    client.stop()
    scheduler.stop(10.0)


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint, and the answer of a node without any cache."""

    path: Path
    cold: list[int]
    blocks: list[bytes]


CASES = [(family, window) for family in TINY_FAMILIES for window in WINDOWS.values()]


@pytest.fixture(scope="module", params=CASES, ids=[f"{family}-{window}" for family, window in CASES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, window = request.param
    path = tmp_path_factory.mktemp("models") / family
    write_tiny(family, path, layers=4, window=window)
    with running(path, memory=0) as node:
        assert node.keeper is None
        cold = node.ask(PROMPT)
    assert len(set(cold.tokens)) > 2, "an answer of one token would prove little"
    with running(path) as node:
        assert node.ask(PROMPT).tokens == cold.tokens, "saving changes nothing"
        return Model(path, cold.tokens, node.stored(PROMPT[:96]))


def resumable_inside(model: Model) -> bool:
    windows = [layer.window for layer in open_checkpoint(model.path).spec.layers]
    return all(window is None or window >= CHUNK for window in windows)


@pytest.mark.parametrize("held", [32, 64, 96])
def test_warm_equals_cold_at_each_end_of_a_block(model: Model, held: int) -> None:
    with running(model.path) as node:
        node.ask((*PROMPT[:held], *OTHER))
        warm = node.ask(PROMPT)
        assert (warm.report.route, warm.report.memory_tokens, warm.report.local_tokens) == (
            Route.LOCAL,
            held,
            TOKENS - held,
        )
        assert warm.tokens == model.cold
        assert node.stored(PROMPT[:96]) == model.blocks, "and every plane of the whole chunks has the same bytes"


@pytest.mark.parametrize("held", [33, 47, 63, 65, 95, 97, 119])
def test_warm_equals_cold_when_prompts_part_inside_a_block(model: Model, held: int) -> None:
    with running(model.path) as node:
        node.ask((*PROMPT[:held], *OTHER))
        warm = node.ask(PROMPT)
        assert warm.report.memory_tokens == (held if resumable_inside(model) else held // CHUNK * CHUNK)
        assert warm.tokens == model.cold
        again = node.ask((*PROMPT, 1, 2))
        assert again.report.memory_tokens >= 96
        assert node.ask(PROMPT).tokens == model.cold


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 40])
def test_the_next_turn_goes_on_where_the_request_before_ended(model: Model, tokens: int) -> None:
    """The second prompt begins with the first and its answer; the answer's last token was not always run."""
    with running(model.path) as node:
        first = node.ask(PROMPT, tokens)
        ended = (*PROMPT, *first.tokens)
        second = (*ended, 9, 8, 7)
        warm = node.ask(second)
        kept = len(ended) - 1
        assert warm.report.memory_tokens == kept
        assert warm.report.held_decoded
        assert node.ask(second).tokens == warm.tokens, "what was saved on top of what was held is right too"
    with running(model.path, memory=0) as node:
        assert node.ask(second).tokens == warm.tokens


def test_an_answer_is_prefilled_again_where_the_policy_says_so(model: Model) -> None:
    with running(model.path, reuse_decoded=False) as node:
        first = node.ask(PROMPT, 40)
        second = (*PROMPT, *first.tokens, 9, 8, 7)
        warm = node.ask(second)
        assert warm.report.memory_tokens == (TOKENS if resumable_inside(model) else 96)
        assert not warm.report.held_decoded
        again = node.ask(second)
        # What prefill has produced by now stands in the place of what decode had.
        assert again.report.memory_tokens >= 128
        assert not again.report.held_decoded
        assert again.tokens == warm.tokens
    with running(model.path, memory=0) as node:
        assert node.ask(second).tokens == warm.tokens


def test_the_same_prompt_again_is_warm(model: Model) -> None:
    with running(model.path) as node:
        node.ask(PROMPT)
        again = node.ask(PROMPT)
        if resumable_inside(model):
            assert (again.report.route, again.report.memory_tokens) == (Route.WARM, TOKENS)
            assert not again.report.held_decoded, "the answer lies behind it in the same block"
        else:
            assert (again.report.route, again.report.memory_tokens) == (Route.LOCAL, 96)
        assert again.tokens == model.cold


LENGTHS = (34, 47, 48, 49, 50, 63, 64, 65, 66, 67, 96, 97, 98)
"""Prompts whose last held-back token lies before, on and after a boundary of the grid or a window's end."""


def test_warm_equals_cold_for_prompts_around_the_edges_of_windows_and_chunks(model: Model, tmp_path: Path) -> None:
    """Asked again, and as the beginning of a longer one, from memory and, after a restart, from disk alone."""
    asked = [PROMPT[:length] for length in LENGTHS]
    longer = [(*prompt, *OTHER[:5]) for prompt in asked]
    with running(model.path, memory=0) as node:
        cold = [node.ask(prompt, 4).tokens for prompt in (*asked, *longer)]
    for index, prompt in enumerate(asked):
        with running(model.path, disk=tmp_path / str(index)) as node:
            node.ask(prompt, 4)
            again, more = node.ask(prompt, 4), node.ask(longer[index], 4)
            assert again.report.memory_tokens >= (len(prompt) - 1) // CHUNK * CHUNK
            assert more.report.memory_tokens >= (len(prompt) - 1) // CHUNK * CHUNK
            assert [again.tokens, more.tokens] == [cold[index], cold[len(asked) + index]]
        with running(model.path, memory=0, disk=tmp_path / str(index)) as node:
            again, more = node.ask(prompt, 4), node.ask(longer[index], 4)
            assert again.report.disk_tokens >= (len(prompt) - 1) // CHUNK * CHUNK
            assert [again.tokens, more.tokens] == [cold[index], cold[len(asked) + index]]


def test_a_restart_goes_on_from_disk(model: Model, tmp_path: Path) -> None:
    with running(model.path, disk=tmp_path) as node:
        node.ask((*PROMPT[:64], *OTHER))
    with running(model.path, memory=0, disk=tmp_path) as node:
        warm = node.ask(PROMPT)
        assert (warm.report.disk_tokens, warm.report.memory_tokens) == (64, 0)
        assert warm.tokens == model.cold
        assert node.stored(PROMPT[:96]) == model.blocks
    with running(model.path, disk=tmp_path) as node:
        assert node.ask(PROMPT).report.disk_tokens >= 96
        assert node.ask(PROMPT).report.memory_tokens >= 96, "what was read once is in memory"


def test_three_requests_at_once_on_one_entry_are_all_cold_s_equal(model: Model) -> None:
    with running(model.path) as node:
        node.ask((*PROMPT[:64], *OTHER))
        sinks: list[queue.Queue[Event]] = [queue.Queue() for _ in range(3)]
        for sink in sinks:
            node.node.submit(GenerationRequest("test", PROMPT, ANSWER), sink.put)
        answers = [collect(sink) for sink in sinks]
        assert [answer.tokens for answer in answers] == [model.cold] * 3
        assert all(answer.report.memory_tokens == 64 for answer in answers)
        assert node.keeper is not None
        assert node.keeper.idle(WAIT_S)
        assert node.stored(PROMPT[:96]) == model.blocks
        assert node.ask(PROMPT).tokens == model.cold


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_tiny("llama", path, layers=4)
    with running(path) as node:
        return Model(path, node.ask(PROMPT).tokens, node.stored(PROMPT[:96]))


@pytest.mark.parametrize("after", range(12))
def test_a_cancel_at_any_moment_leaves_the_store_valid(llama: Model, after: int) -> None:
    """Cancelled after so many events; what was saved by then must be what a whole request saves."""
    with running(llama.path) as node:
        node.ask((*PROMPT[:32], *OTHER))
        events: queue.Queue[Event] = queue.Queue()
        generation = node.node.submit(GenerationRequest("test", PROMPT, 40), events.put)
        for event in itertools.islice(iter(lambda: events.get(timeout=WAIT_S), None), after):
            assert isinstance(event, PrefillProgress | RouteReport | TokenEvent)
        generation.cancel()
        while not isinstance(events.get(timeout=WAIT_S), Finished):
            pass
        assert node.keeper is not None
        assert node.keeper.idle(WAIT_S)
        stored = node.stored(PROMPT[:96])
        assert stored[: len(llama.blocks)] == llama.blocks[: len(stored)]
        assert node.ask(PROMPT).tokens == llama.cold
        # Every staging slot came back: as many requests as there are slots still find one.
        for _ in range(3):
            assert node.ask(PROMPT).tokens == llama.cold


def test_a_small_memory_keeps_answers_right(llama: Model) -> None:
    geometry = Geometry.of(open_checkpoint(llama.path).spec, ElementType.F16)
    chunk_nbytes = geometry.layer_token_nbytes * 4 * CHUNK
    with running(llama.path, memory=2 * chunk_nbytes) as node:
        for _ in range(3):
            node.ask((*PROMPT[:32], *OTHER))
            assert node.ask(PROMPT).tokens == llama.cold
        assert node.keeper is not None
        assert int(str(node.keeper.store.stats()["memory_nbytes"])) <= 2 * chunk_nbytes


@pytest.mark.parametrize("held", [32, 50, 64, 88])
def test_a_delta_moves_exactly_the_bytes_that_are_not_held(llama: Model, held: int) -> None:
    with producing(llama.path) as client:
        with running(llama.path, memory=0, client=client) as node:
            remote = node.ask(PROMPT)
        assert remote.report.route is Route.REMOTE
        with running(llama.path, client=client) as node:
            node.ask((*PROMPT[:held], *OTHER))
            delta = node.ask(PROMPT)
            assert (delta.report.route, delta.report.memory_tokens) == (Route.REMOTE, held)
            assert delta.report.remote_tokens == TOKENS - held
            # 4 layers, keys and values of 2 heads of 16 in 2 bytes.
            assert delta.report.payload_nbytes == (TOKENS - held) * 4 * 2 * 2 * 16 * 2
            assert delta.tokens == remote.tokens == llama.cold
            again = node.ask(PROMPT)
            assert (again.report.route, again.report.remote_tokens) == (Route.WARM, 0)
            assert again.tokens == llama.cold


def test_what_a_producer_sent_is_kept_and_is_warm_after_a_restart(llama: Model, tmp_path: Path) -> None:
    with producing(llama.path) as client, running(llama.path, disk=tmp_path, client=client) as node:
        assert node.ask(PROMPT).report.route is Route.REMOTE
    with running(llama.path, disk=tmp_path) as node:
        again = node.ask(PROMPT)
        assert (again.report.route, again.report.disk_tokens) == (Route.WARM, TOKENS)
        assert again.tokens == llama.cold


def test_what_a_producer_sent_is_saved_from_its_own_bytes_off_the_engine_s_thread(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks are copied by the thread that received them, with the bytes that the cache would give."""
    copied: list[int] = []
    words = Recorder._words

    def counted(self: Recorder, firsts: tuple[int, ...], stop: int) -> object:
        copied.append(stop)
        return words(self, firsts, stop)

    monkeypatch.setattr(Recorder, "_words", counted)
    with producing(model.path) as client:
        with running(model.path, client=client) as node:
            remote = node.ask(PROMPT)
            assert remote.report.route is Route.REMOTE
            assert min(copied) > 96
            saved = node.stored(PROMPT[:96])
            assert node.ask(PROMPT).tokens == remote.tokens
        with running(model.path, client=client) as node:
            node.node._engine._floor.workshop.staging.pool.keeps = False  # type: ignore[union-attr]
            copied.clear()
            assert node.ask(PROMPT).tokens == remote.tokens
            assert min(copied) == 32
            assert node.stored(PROMPT[:96]) == saved
    assert len(saved) == 3


def test_a_request_under_way_when_the_node_stops_is_saved_as_far_as_it_came(llama: Model, tmp_path: Path) -> None:
    with running(llama.path, disk=tmp_path) as node:
        ended = threading.Event()

        def stop_at_the_first_token(event: Event) -> None:
            if isinstance(event, TokenEvent):
                # No turn of the engine's loop comes after this one.
                node.node._engine._stopping.set()
            elif isinstance(event, Finished):
                ended.set()

        node.node.submit(GenerationRequest("test", PROMPT, 40), stop_at_the_first_token)
        assert ended.wait(WAIT_S)
    with running(llama.path, memory=0, disk=tmp_path) as node:
        again = node.ask(PROMPT)
        assert (again.report.route, again.report.disk_tokens) == (Route.WARM, TOKENS)
        assert again.tokens == llama.cold


def test_without_a_cache_every_request_is_cold(llama: Model) -> None:
    with running(llama.path, memory=0) as node:
        for _ in range(2):
            answer = node.ask(PROMPT)
            assert (answer.report.route, answer.report.held_tokens) == (Route.LOCAL, 0)
        assert node.node.describe_status()["cache"] is None


STOPPING = "Say where the ships go when the harbour is closed. " * 3


@pytest.mark.parametrize("kind", ["text", "token"])
def test_stops_cut_an_answer_at_the_same_place_local_remote_and_warm(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny"
    write_tiny("llama", path)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": STOPPING}], "max_tokens": 40, "seed": 5}
    with (
        producing(path) as client,
        running(path, memory=0) as cold,
        running(path, client=client) as node,
        served(cold.node) as near,
        served(node.node) as far,
    ):

        def ask(url: str, **more: Any) -> tuple[str, Any]:
            response = httpx.post(f"{url}/v1/chat/completions", json={**asked, **more}, timeout=WAIT_S)
            body = response.json()
            choice = body["choices"][0]
            assert node.keeper is not None
            assert node.keeper.idle(WAIT_S)
            bytes_of = [entry["bytes"] for entry in (choice["logprobs"] or {"content": []})["content"]]
            told = choice["message"]["content"], choice["finish_reason"], body["usage"]["completion_tokens"], bytes_of
            return body["muser"]["route"], told

        _, (text, _, _, entries) = ask(near, logprobs=True)
        cut = next(place for place in range(8, len(text)) if text.index(text[place : place + 3]) == place)
        stop: Any = [text[cut : cut + 3], "\x00"]
        if kind == "token":
            tokenizer = load_tokenizer(path)
            stop = [token for token in range(512) if list(tokenizer.token_bytes(token)) == entries[12]]
        answers = [ask(url, stop=stop, logprobs=True) for url in (near, far, far)]
    assert [route for route, _ in answers] == ["local", "remote", "warm"]
    (_, local), (_, remote), (_, warm) = answers
    assert local == remote == warm
    before = entries[: entries.index(entries[12])]
    expected = text[:cut] if kind == "text" else b"".join(map(bytes, before)).decode("utf-8", "replace")
    assert local[:2] == (expected, "stop")
