"""The reference lane: what is reused has the bytes of what would be computed, whoever produced it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from exact_runs import compiled_operations

from muser_decode.engine.loop import Engine
from muser_decode.engine.request import Event, Failed, Finished, GenerationRequest, RouteReport, TokenEvent
from muser_decode.held import HeldSource
from muser_decode.keeper import Keeper
from muser_decode.reference.compiled.choice import reference_decoder
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore
from muser_wire.reference.tiny import RandomWeights, random_spec

CHUNK, TOKENS, ANSWER = 16, 50, 8
PLENTY = 64 << 20
WAIT_S = 60.0
SEEDS = range(6)


@dataclass
class Node:
    """An engine of the reference lane. `keeper` None: nothing is kept."""

    engine: Engine
    keeper: Keeper | None

    def ask(self, prompt: list[int], tokens: int = ANSWER) -> tuple[RouteReport, list[int]]:
        events: queue.Queue[Event] = queue.Queue()
        source = None if self.keeper is None else HeldSource(self.keeper, prompt, lambda held: "")
        self.engine.submit(GenerationRequest("test", tuple(prompt), tokens), events.put, source)
        report, answer = None, []
        while not isinstance(event := events.get(timeout=WAIT_S), Finished):
            assert not isinstance(event, Failed), event
            if isinstance(event, RouteReport):
                report = event
            elif isinstance(event, TokenEvent):
                answer.append(event.token_id)
        if self.keeper is not None:
            assert self.keeper.idle(WAIT_S)
        assert report is not None
        return report, answer

    def planes(self, ids: list[int]) -> list[bytes]:
        """The planes of each whole chunk that is held of these tokens."""
        assert self.keeper is not None
        store = self.keeper.store
        fetched = [store.fetch(part.head) for part in store.match(pack_ids(ids)).blocks if part.head.tokens == CHUNK]
        return [bytes(item.block.payload) for item in fetched if item is not None]


KINDS = ("mlx", "compiled")
"""The decode node's two decoders: MLX's operations, and the compiled kernels that a CPU has."""


@contextlib.contextmanager
def running(seed: int, kind: str, *, keeps: bool) -> Iterator[Node]:
    weights = RandomWeights(random_spec(seed), seed)
    geometry = Geometry.of(weights.spec, ElementType.F16)
    digest = Digest(b"d" * 32)
    identities = Identities(digest, digest, "kv1", "reference", digest, CHUNK, digest)
    keeper = Keeper(BlockStore(Namer(bytes(32), identities), geometry, PLENTY)) if keeps else None
    engine = Engine(
        lambda: reference_decoder(weights, compiled_operations() if kind == "compiled" else None),
        chunk_tokens=CHUNK,
        max_queue=4,
        staging_nbytes=geometry.layer_token_nbytes * len(geometry.windows) * CHUNK,
        keeper=keeper,
    )
    if keeper is not None:
        keeper.start()
    engine.start()
    try:
        yield Node(engine, keeper)
    finally:
        assert engine.stop()
        if keeper is not None:
            keeper.stop()


def prompt_of(seed: int) -> list[int]:
    vocab = random_spec(seed).vocab_size
    return np.random.default_rng(seed).integers(0, vocab, TOKENS).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_warm_is_cold_bit_for_bit_and_so_is_what_decode_produced(seed: int, kind: str) -> None:
    prompt = prompt_of(seed)
    with running(seed, kind, keeps=False) as node:
        _, cold = node.ask(prompt, 40)
        turn = [*prompt, *cold, 1, 2, 3]
        _, cold_turn = node.ask(turn)
    with running(seed, kind, keeps=True) as node:
        assert node.ask(prompt, 40)[1] == cold
        report, answer = node.ask(turn)
        assert answer == cold_turn
        assert report.held_tokens >= (TOKENS + 39) // CHUNK * CHUNK
        assert report.held_decoded
        decoded = node.planes(turn)
    with running(seed, kind, keeps=True) as node:
        assert node.ask(turn)[1] == cold_turn
        prefilled = node.planes(turn)
    assert len(decoded) >= len(turn) // CHUNK, "every whole chunk of the turn is compared"
    assert decoded == prefilled, "decode and prefill gave the same bytes"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [16, 17, 31, 32, 33, 40, 48])
def test_warm_is_cold_at_every_place_where_a_prompt_can_go_on(held: int, kind: str) -> None:
    prompt = prompt_of(3)
    other = [(token + 1) % random_spec(3).vocab_size for token in prompt]
    with running(3, kind, keeps=False) as node:
        _, cold = node.ask(prompt)
    with running(3, kind, keeps=True) as node:
        node.ask([*prompt[:held], *other[held:]])
        report, answer = node.ask(prompt)
        assert answer == cold
        assert report.held_tokens >= (held // CHUNK * CHUNK if held >= 32 else 0)
        assert node.ask(prompt)[1] == cold
