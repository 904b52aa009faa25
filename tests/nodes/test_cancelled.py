"""A request that is cancelled while its prompt is computed leaves what was finished to the next one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.client import Consumer
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache
from muser_decode.engine.loop import Engine
from muser_decode.engine.pace import Pace
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RouteReport,
    TokenEvent,
)
from muser_decode.held import HeldSource
from muser_decode.keeping import CacheSizes, open_keeper
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane

GRID = 512
WAIT_S = 60.0
LAYERS = 4
PROMPT = tuple(np.random.default_rng(4).integers(10, 500, 900).tolist())


class Layered(MlxDecoder):
    """Tells of each layer of a prefill that is computed, but for the last ones of its chunks."""

    on_layer: Callable[[], None] = staticmethod(lambda: None)

    def prefill_chunk(self, ids: Sequence[int], cache: KVCache, go_on: Callable[[], bool] | None = None) -> bool:
        def told() -> bool:
            self.on_layer()
            return go_on is None or go_on()

        return super().prefill_chunk(ids, cache, told)


def collect(events: queue.Queue[Event]) -> tuple[list[int], RouteReport | None, FinishReason]:
    tokens, report = [], None
    while True:
        match events.get(timeout=WAIT_S):
            case TokenEvent(token):
                tokens.append(token)
            case RouteReport() as route:
                report = route
            case Finished() as last:
                return tokens, report, last.reason
            case Failed() as failed:
                pytest.fail(failed.message)
            case _:
                pass


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("layers", "kept"), [(7, 256), (14, 512), (20, 768)])
def test_finished_units_are_there_for_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layers: int, kept: int
) -> None:
    """Units of 128 tokens, of each of which three layers of four are told of; the cancel comes in the next one's."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    path = tmp_path / family
    write_tiny(family, path, layers=LAYERS, window=200)
    checkpoint = open_checkpoint(path)
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    identities = node_identities(
        checkpoint, load_tokenizer(path), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=GRID
    )
    made: list[Layered] = []

    def factory() -> MlxDecoder:
        made.append(Layered(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False))
        return made[0]

    consumer = Consumer(checkpoint.spec, identities, geometry)
    with open_keeper(CacheSizes(1 << 28, 0, path), consumer, "f32 dense") as keeper:
        assert keeper is not None
        slot_nbytes = geometry.layer_token_nbytes * LAYERS * GRID
        engine = Engine(factory, chunk_tokens=GRID, max_queue=2, staging_nbytes=slot_nbytes, keeper=keeper)
        engine.start()
        submitted, told = threading.Event(), [0]

        def cancel() -> None:
            told[0] += 1
            if told[0] == layers:
                assert submitted.wait(WAIT_S)
                generation.cancel()

        made[0].on_layer = cancel
        events: queue.Queue[Event] = queue.Queue()
        request = GenerationRequest("first", PROMPT, 20)
        generation = engine.submit(request, events.put, None, "no producer")
        submitted.set()
        assert collect(events) == ([], None, FinishReason.CANCELLED)
        assert told[0] == layers
        assert keeper.idle(WAIT_S)

        engine.submit(request, events.put, HeldSource(keeper, PROMPT, lambda held: "no producer"))
        warm, report, _ = collect(events)
        assert report is not None
        assert (report.memory_tokens, report.local_tokens) == (kept, len(PROMPT) - 1 - kept)
        engine.submit(request, events.put, None, "cold")
        cold, _, _ = collect(events)
        assert warm == cold
        assert engine.stop()


def test_what_is_kept_gives_way_to_requests(tmp_path: Path) -> None:
    """Both live in one memory: while a request runs there is less for what was kept, and it is evicted first."""
    write_tiny("llama", tmp_path / "m", layers=2)
    checkpoint = open_checkpoint(tmp_path / "m")
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    identities = node_identities(
        checkpoint, load_tokenizer(tmp_path / "m"), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=GRID
    )
    # Two layers, keys and values, two heads of 16 in float32, so many positions.
    total = 2 * 2 * 2 * 16 * 4 * 2_048
    consumer = Consumer(checkpoint.spec, identities, geometry)
    with open_keeper(CacheSizes(1 << 30, 0, tmp_path), consumer, "f32 dense") as keeper:
        assert keeper is not None
        sizes = {"chunk_tokens": GRID, "max_queue": 2, "staging_nbytes": 64}
        engine = Engine(lambda: decoder_of(checkpoint), **sizes, memory_nbytes=total, keeper=keeper)
        engine.start()
        events: queue.Queue[Event] = queue.Queue()
        engine.submit(GenerationRequest("first", PROMPT, 20), events.put, None, "cold")
        collect(events)
        assert keeper.idle(WAIT_S)
        kept = keeper.store.stats()["memory_nbytes"]
        # The first took half of the memory, for 1,024 positions.
        assert isinstance(kept, int)
        assert 0 < kept < total / 2
        seen: list[object] = []

        def watch(event: Event) -> None:
            seen.append(keeper.store.stats()["memory_nbytes"])
            events.put(event)

        engine.submit(
            GenerationRequest("second", PROMPT[::-1], 1_100, stop_ids=frozenset(range(512))), watch, None, "cold"
        )
        collect(events)
        # It took all of the memory, so nothing was kept while it ran.
        assert set(seen[:-1]) == {0}
        assert engine.stop()


def decoder_of(checkpoint: Checkpoint) -> MlxDecoder:
    return MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False)
