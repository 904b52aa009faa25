"""What the real service and scheduler tell while they serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.observer import Computed, Sent
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.geometry import ElementType, Geometry
from muser_wire.messages import (
    Acceptance,
    HandoffRequest,
    decode_open_answer,
    encode_handoff_request,
    encode_stream_request,
)
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.schedule import WindowPolicy
from muser_wire.transport.memory import MemoryChannel

CHUNK = 64
INCARNATION = b"i" * 16


class Told:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def accepted(self) -> None:
        self.all.append("accepted")

    def refused(self, code: str) -> None:
        self.all.append(code)

    def computed(self, computed: Computed) -> None:
        self.all.append(computed)

    def sent(self, sent: Sent) -> None:
        self.all.append(sent)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def channel(tiny_llama: Any, told: Told) -> Any:
    checkpoint = open_checkpoint(tiny_llama)
    decoder = TorchDecoder(checkpoint, dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu"))
    scheduler = Scheduler(decoder, CHUNK, 1, None, told)
    scheduler.start()
    identities = node_identities(
        checkpoint, load_tokenizer(tiny_llama), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=CHUNK
    )
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    facts = ProducerFacts(checkpoint.spec, identities, geometry, (), 1, INCARNATION)
    service = ProducerService(facts, NodeKey(Ed25519PrivateKey.generate()), scheduler, observer=told)
    yield MemoryChannel(service), request(identities)
    scheduler.stop(10.0)


def request(identities: Any) -> HandoffRequest:
    return HandoffRequest(
        handoff_id=bytes(16),
        expected=identities,
        incarnation=INCARNATION,
        token_ids=np.arange(5, 206, dtype=np.uint32),
        held_tokens=0,
        policy=WindowPolicy.ROLLING,
        secret=bytes(32),
        allow_unqualified=False,
    )


def opened(channel: Any, wanted: HandoffRequest) -> Any:
    answer = decode_open_answer(channel.open(encode_handoff_request(wanted), 1.0))
    assert isinstance(answer, Acceptance)
    return channel.stream(encode_stream_request(answer.ticket), 1)


def test_a_whole_handoff_is_accepted_computed_and_sent(channel: Any, told: Told) -> None:
    memory, wanted = channel
    assert len(list(opened(memory, wanted))) == 6
    assert told.all[0] == "accepted"
    # The computation is told of on its own thread, the stream on the reader's.
    (computed,) = [each for each in told.all if isinstance(each, Computed)]
    (sent,) = [each for each in told.all if isinstance(each, Sent)]
    assert (computed.tokens, computed.reused_tokens) == (200, 0)
    assert 0 <= computed.waited_s < computed.seconds
    # 200 tokens in four chunks; 6 layers, keys and values, 2 heads of 16, 2 bytes.
    assert (sent.code, sent.segments, sent.payload_nbytes) == ("sealed", 4, 200 * 6 * 2 * 2 * 16 * 2)
    assert sent.seconds > 0


def test_a_reader_that_leaves_is_told_of_with_what_it_took(channel: Any, told: Told) -> None:
    memory, wanted = channel
    frames = iter(opened(memory, wanted))
    for _ in range(3):
        next(frames)
    frames.close()
    (sent,) = [each for each in told.all if isinstance(each, Sent)]
    assert (sent.code, sent.segments) == ("gone", 1)


def test_a_refusal_is_told_of_by_its_code(channel: Any, told: Told) -> None:
    memory, wanted = channel
    memory.open(encode_handoff_request(dataclasses.replace(wanted, incarnation=b"j" * 16)), 1.0)
    assert told.all == ["stale_incarnation"]
