"""The product's contestant for warm prompts: the engine, with or without what it keeps of prompts.

Runs in the product's environment.
"""

from __future__ import annotations

import queue
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from muser_decode.blas import load_blas

BLAS = load_blas()
COPIES = 7

import mlx.core as mx  # noqa: E402, after the BLAS
import numpy as np  # noqa: E402
from lines import serve  # noqa: E402

from muser_decode.client import Consumer  # noqa: E402
from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.loop import Engine  # noqa: E402
from muser_decode.engine.request import (  # noqa: E402
    Event,
    Failed,
    Finished,
    GenerationRequest,
    RouteReport,
    TokenEvent,
)
from muser_decode.held import HeldSource  # noqa: E402
from muser_decode.keeper import Keeper  # noqa: E402
from muser_decode.keeping import CacheSizes, open_keeper  # noqa: E402
from muser_wire.geometry import ElementType, Geometry  # noqa: E402
from muser_wire.identities import Digest, Identities  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.transport.malloc import raise_malloc_thresholds  # noqa: E402

NO_DIGEST = Digest(bytes(32))


class Contestant:
    """Holds the engine between requests."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def load(self, model: str, chunk: int, memory_mb: int, disk_mb: int, directory: str) -> dict[str, Any]:
        """Load a model in f32; 0 MB of memory and disk keep nothing."""
        # As the node does at its start.
        raise_malloc_thresholds()
        checkpoint = open_checkpoint(Path(model))
        geometry = Geometry.of(checkpoint.spec, ElementType.F16)
        # One model only, so its identities need not be computed.
        identities = Identities(NO_DIGEST, NO_DIGEST, "", "", NO_DIGEST, chunk, NO_DIGEST)
        sizes = CacheSizes(memory_mb * 1_000_000, disk_mb * 1_000_000, Path(directory))
        consumer = Consumer(checkpoint.spec, identities, geometry)
        self._keeper: Keeper | None = self._stack.enter_context(open_keeper(sizes, consumer, "bench"))
        self._engine = Engine(
            lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
            chunk_tokens=chunk,
            max_queue=4,
            staging_nbytes=geometry.layer_token_nbytes * len(geometry.windows) * chunk,
            keeper=self._keeper,
        )
        self._engine.start()
        self._stack.callback(self._engine.stop)
        return {"mlx": mx.__version__, "blas": BLAS}

    def ask(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Time the first token of a greedy answer; also each of the others, and what was held."""
        events: queue.Queue[Event] = queue.Queue()
        times, answer, report = [], [], None
        source = None if self._keeper is None else HeldSource(self._keeper, ids, lambda held: "")
        started = time.perf_counter()
        self._engine.submit(GenerationRequest("bench", tuple(ids), tokens), events.put, source)
        while not isinstance(event := events.get(), Finished):
            match event:
                case Failed(message):
                    raise RuntimeError(message)
                case RouteReport():
                    report = event
                case TokenEvent(token):
                    times.append(time.perf_counter() - started)
                    answer.append(token)
        if self._keeper is not None:
            self._keeper.idle(60)
        return {
            "first_s": times[0],
            "steps_s": [after - before for before, after in pairwise(times)],
            "tokens": answer,
            "cached": report.held_tokens if report else 0,
            "origin": "disk" if report and report.disk_tokens else "memory",
        }

    def copy(self, nbytes: int) -> dict[str, Any]:
        """Time a copy of so many bytes from memory to memory that has been touched before."""
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        times = []
        for _ in range(COPIES):
            started = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - started)
        return {"copy_s": statistics.median(times)}

    def close(self) -> dict[str, Any]:
        """Stop, so that another process may use the directory."""
        self._stack.close()
        return {}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"load": contestant.load, "ask": contestant.ask, "copy": contestant.copy, "close": contestant.close})
