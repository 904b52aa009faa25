"""An engine with a tiny model, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine_runs import GRID, NEW, PROMPT, TOKENS, Layered, make_decoder, new_engine

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint


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
