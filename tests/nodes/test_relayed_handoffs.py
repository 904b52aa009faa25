"""A handoff that breaks at every frame is carried on by another producer, for full and for sliding layers."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from stream_faults import die, flip

from muser_decode.client import ProducerClient, ProducerState
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import GenerationRequest, Route
from muser_decode.keeping import CacheSizes, open_keeper
from muser_decode.node import DecodeNode
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.transport.memory import MemoryChannel

PROMPT = tuple(5 + (index * 37) % 90 for index in range(300))
"""Five chunks of 64, the last one short."""

TOKENS = len(PROMPT) - 1


def flip_last(place: int) -> Any:
    return flip(place, -1)


@pytest.fixture(params=["llama", "gemma3", "muse_glimmer"])
def both(request: pytest.FixtureRequest, tmp_path: Path, started: Any) -> Any:
    """A pair, a second producer of the same model named "second"."""
    new_pair, new_producer = started
    path = tmp_path / request.param
    write_tiny(request.param, path, layers=6)
    pair = new_pair(path, new_producer(path))
    second = new_producer(path)
    client = ProducerClient(MemoryChannel(second.service), pair.client._consumer, name="second")
    client.refresh()
    pair.node._producers._clients["second"] = client
    return pair, client


@pytest.mark.parametrize("fault", [die, flip_last])
def test_the_answer_is_the_local_one_wherever_the_first_handoff_breaks(both: Any, fault: Any) -> None:
    pair, second = both
    first = pair.client
    for client in (first, second):
        client._status = dataclasses.replace(client.status, state=ProducerState.UNREACHABLE)
    alone = pair.ask(PROMPT, tokens=8)
    assert alone.report.route is Route.LOCAL
    first._status = dataclasses.replace(first.status, state=ProducerState.READY)
    whole = pair.ask(PROMPT, tokens=8)
    assert (whole.report.route, whole.tokens) == (Route.REMOTE, alone.tokens)

    for place in range(whole.report.segments_verified + 2):
        # The second is ready once the first has been chosen: it is found by the relay alone.
        first.refresh()
        second._status = dataclasses.replace(second.status, state=ProducerState.UNREACHABLE)

        def breaking(frames: Iterator[bytes], place: int = place) -> Iterator[bytes]:
            second.refresh()
            yield from fault(place)(frames)

        answer = pair.ask(PROMPT, tokens=8, fault=breaking)
        report = answer.report
        assert answer.tokens == alone.tokens
        brought = dict(report.producers)
        kept = brought.get("producer", 0)
        assert kept % 64 == 0 or kept == TOKENS
        assert report.local_tokens == 0
        assert kept + brought.get("second", 0) == report.remote_tokens == TOKENS
        if kept in (0, TOKENS):
            # Nothing of the first one was used, or only its seal was missing.
            assert report.route is (Route.REMOTE if kept == 0 else Route.SALVAGED)
        else:
            assert report.route is Route.SALVAGED
            assert report.reason.startswith("producer: ")
        # What comes twice is less than a chunk: nothing that was kept is sent again.
        assert report.payload_nbytes < whole.report.payload_nbytes * (TOKENS + 64) / TOKENS


@pytest.fixture
def keeping(both: Any, tmp_path: Path) -> Iterator[Any]:
    """The pair's node with a memory of prompts: ask(prompt, fault) gives an answer."""
    pair, second = both
    path = next(each for each in tmp_path.iterdir() if each.is_dir())
    checkpoint, consumer = open_checkpoint(path), pair.client._consumer
    sizes = CacheSizes(1 << 28, 0, tmp_path)
    with open_keeper(sizes, consumer, "f32 dense") as keeper:
        engine = Engine(
            lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
            chunk_tokens=64,
            max_queue=8,
            staging_nbytes=consumer.geometry.layer_token_nbytes * len(consumer.geometry.windows) * 64,
            keeper=keeper,
        )
        node = DecodeNode(pair.node._model, engine, pair.node._producers, keeper)
        engine.start()

        def ask(prompt: tuple[int, ...], fault: Any = None) -> Any:
            pair.service.fault = fault
            events: queue.Queue[Any] = queue.Queue()
            node.submit(GenerationRequest("warm", prompt, 8), events.put)
            answer = pair.collect(events)
            assert keeper is not None
            assert keeper.idle(10.0)
            return answer

        yield ask, pair, second
        assert engine.stop()


def test_what_was_held_what_two_producers_brought_and_a_local_run_are_one_cache(keeping: Any) -> None:
    ask, pair, second = keeping
    longer = (*PROMPT[:192], *(7 + (index * 29) % 80 for index in range(200)))
    tokens = len(longer) - 1
    for client in (pair.client, second):
        client._status = dataclasses.replace(client.status, state=ProducerState.UNREACHABLE)
    alone = pair.ask(longer, tokens=8)
    assert alone.report.route is Route.LOCAL

    pair.client.refresh()
    assert ask(PROMPT).report.route is Route.REMOTE

    def breaking(frames: Iterator[bytes]) -> Iterator[bytes]:
        second.refresh()
        # Begin, and one whole chunk, which is one segment, of the three and a bit that are missing.
        yield from die(2)(frames)

    answer = ask(longer, breaking)
    report = answer.report
    assert answer.tokens == alone.tokens
    assert report.route is Route.SALVAGED
    assert report.memory_tokens == 192
    brought = dict(report.producers)
    assert brought == {"producer": 64, "second": tokens - 192 - 64}
    assert report.local_tokens == report.disk_tokens == 0
    assert sum(report.tokens_by_origin.values()) == tokens
    # And what came by three ways is kept as one: the next turn finds all of it.
    again = ask((*longer, *answer.tokens[:1]))
    assert again.report.memory_tokens >= 192 + 128
