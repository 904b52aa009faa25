"""An engine on a tiny model, requests to it, and sinks that wait for what it tells."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    RouteReport,
    SamplingParams,
    TokenEvent,
)
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
