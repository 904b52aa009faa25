"""What the producer accepts and refuses, before any work."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire import messages as m
from muser_wire.auth import NodeKey
from muser_wire.errors import RemoteProtocolError
from muser_wire.framing import parse_frame
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Identities, digest_of
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule
from muser_wire.transport.memory import MemoryCall

CHUNK_TOKENS = 32


@pytest.fixture(scope="module")
def decoder(tiny_llama: Path) -> TorchDecoder:
    return TorchDecoder(
        open_checkpoint(tiny_llama), dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu")
    )


@pytest.fixture(scope="module")
def identities(tiny_llama: Path) -> Identities:
    return node_identities(
        open_checkpoint(tiny_llama),
        load_tokenizer(tiny_llama),
        element=ElementType.F16,
        lane=Lane.NATIVE,
        chunk_tokens=CHUNK_TOKENS,
    )


@pytest.fixture
def service(decoder: TorchDecoder, identities: Identities) -> Iterator[ProducerService]:
    scheduler = Scheduler(decoder, CHUNK_TOKENS, max_waiting=1)
    scheduler.start()
    facts = ProducerFacts(
        spec=decoder.spec,
        identities=identities,
        geometry=Geometry.of(decoder.spec, ElementType.F16),
        kernels=decoder.admitted,
        data_port=4951,
        incarnation=os.urandom(16),
    )
    yield ProducerService(facts, NodeKey(Ed25519PrivateKey.generate()), scheduler)
    scheduler.stop(10.0)


def described(service: ProducerService) -> m.Description:
    return m.decode_description(service.describe(m.encode_describe_request()))


def request_to(service: ProducerService, **changes: Any) -> m.HandoffRequest:
    description = described(service)
    request = m.HandoffRequest(
        handoff_id=os.urandom(16),
        expected=description.identities,
        incarnation=description.incarnation,
        token_ids=np.arange(100, dtype=np.uint32),
        held_tokens=0,
        policy=WindowPolicy.ROLLING,
        secret=os.urandom(32),
        allow_unqualified=False,
    )
    return dataclasses.replace(request, **changes)


def opened(service: ProducerService, request: m.HandoffRequest) -> m.Acceptance | m.Refusal:
    return m.decode_open_answer(service.open(m.encode_handoff_request(request)))


def streamed(service: ProducerService, ticket: bytes) -> list[m.FrameKind]:
    frames = service.stream(m.encode_stream_request(ticket), MemoryCall())
    return [parse_frame(raw).kind for raw in frames]


def test_it_describes_what_it_is(service: ProducerService) -> None:
    description = described(service)
    assert description.data_port == 4951
    assert description.max_prompt_tokens == 2048
    assert digest_of(b"muser spec 1", description.spec_json) == description.identities.spec_digest
    assert "attention.chunked" in description.kernels


def test_an_accepted_handoff_streams_begin_segments_and_seal(service: ProducerService) -> None:
    request = request_to(service)
    answer = opened(service, request)
    assert isinstance(answer, m.Acceptance)
    schedule = build_schedule(ScheduleRequest(service._facts.geometry, 100, 0, CHUNK_TOKENS, WindowPolicy.ROLLING))
    assert answer.schedule_digest == schedule.digest
    assert answer.predicted_chunk_ns > 0
    kinds = streamed(service, answer.ticket)
    assert kinds == [m.FrameKind.BEGIN, *[m.FrameKind.SEGMENT] * len(schedule.segments), m.FrameKind.SEAL]
    with pytest.raises(RemoteProtocolError, match="already used"):
        streamed(service, answer.ticket)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"incarnation": b"x" * 16}, "stale_incarnation", "restarted"),
        (
            {"token_ids": np.zeros(2049, dtype=np.uint32)},
            "prompt_too_long",
            "the prompt has 2049 tokens, the model takes 2048",
        ),
        ({"token_ids": np.array([1, 512], dtype=np.uint32)}, "bad_token", "512 is outside the vocabulary of 512"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    service: ProducerService, changes: dict[str, Any], code: str, text: str
) -> None:
    answer = opened(service, request_to(service, **changes))
    assert isinstance(answer, m.Refusal)
    assert answer.code == code
    assert text in answer.message


@pytest.mark.parametrize(
    "field",
    ["spec_digest", "tokenizer_digest", "kv_layout", "lane", "numerics_digest", "chunk_tokens", "weights_digest"],
)
def test_every_identity_that_differs_is_refused_by_name(service: ProducerService, field: str) -> None:
    ours = described(service).identities
    value: object = {str: "other", int: 31, bytes: b"x" * 32}[type(getattr(ours, field))]
    expected = dataclasses.replace(ours, **{field: value})
    answer = opened(service, request_to(service, expected=expected))
    assert isinstance(answer, m.Refusal)
    assert answer.code == "identity_mismatch"
    assert answer.message.startswith(f"{field} differs: ")
    waived = opened(service, request_to(service, expected=expected, allow_unqualified=True))
    assert isinstance(waived, m.Acceptance) == (field == "weights_digest")


def test_accepted_handoffs_hold_their_place_and_the_next_is_refused(service: ProducerService) -> None:
    accepted = [opened(service, request_to(service)) for _ in range(2)]
    assert all(isinstance(answer, m.Acceptance) for answer in accepted)
    assert accepted[1].predicted_wait_ns > accepted[0].predicted_wait_ns  # type: ignore[union-attr]
    refused = opened(service, request_to(service))
    assert isinstance(refused, m.Refusal)
    assert refused.code == "busy"
    for answer in accepted:
        assert isinstance(answer, m.Acceptance)
        assert streamed(service, answer.ticket)[-1] is m.FrameKind.SEAL
    late = opened(service, request_to(service))
    assert isinstance(late, m.Acceptance)
    streamed(service, late.ticket)


def test_a_ticket_that_nobody_uses_gives_its_place_back(
    service: ProducerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert isinstance(opened(service, request_to(service)), m.Acceptance)
    assert isinstance(opened(service, request_to(service)), m.Refusal)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 10.1)
    answer = opened(service, request_to(service))
    assert isinstance(answer, m.Acceptance)
    streamed(service, answer.ticket)


def test_malformed_calls_are_the_peers_fault(service: ProducerService) -> None:
    for call in (service.describe, service.open):
        with pytest.raises(RemoteProtocolError):
            call(b"\xff\xff")
    with pytest.raises(RemoteProtocolError):
        list(service.stream(b"", MemoryCall()))


def test_windows_by_the_final_policy_are_refused_by_name(service: ProducerService) -> None:
    geometry = dataclasses.replace(service._facts.geometry, windows=(8, *service._facts.geometry.windows[1:]))
    service._facts = dataclasses.replace(service._facts, geometry=geometry)
    answer = opened(service, request_to(service, policy=WindowPolicy.FINAL))
    assert isinstance(answer, m.Refusal)
    assert answer.code == "window_policy"
    assert service._scheduler.load == 0


def test_a_handoff_is_under_way_until_its_last_frame_has_left(service: ProducerService) -> None:
    assert not service.under_way
    answer = opened(service, request_to(service))
    assert isinstance(answer, m.Acceptance)
    assert service.under_way, "it was promised a place"
    frames = service.stream(m.encode_stream_request(answer.ticket), MemoryCall())
    next(frames)
    # The computation is done long before a slow reader has everything.
    while service._scheduler.load:
        pass
    assert service.under_way
    assert len(list(frames)) > 1
    assert not service.under_way


def test_the_rate_changes_for_the_frames_to_come(service: ProducerService, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _self, timeout=None: waits.append(timeout))
    frame = bytes(1000)
    assert service._paced(frame, threading.Event()) == frame
    service.set_max_rate(100.0)
    service._paced(frame, threading.Event())
    service._paced(frame, threading.Event())
    # The second one waits until the first has left at 100 bytes a second.
    assert waits == [pytest.approx(10.0, abs=1.0)]
    service.set_max_rate(0.0)
    service._paced(frame, threading.Event())
    assert len(waits) == 1
