"""Claims of a peer cost no memory, large handoffs work, and no nonce is ever used twice."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from muser_wire.auth import FrameCipher, NodeKey
from muser_wire.errors import FrameError, RemoteProtocolError
from muser_wire.framing import FrameReader, FrameWriter, parse_frame
from muser_wire.geometry import ElementType, Geometry
from muser_wire.handoff import ConsumerHandoff, ProducerHandoff, Sealed, Terms
from muser_wire.identities import Digest, Identities
from muser_wire.messages import FrameKind, decode_description, decode_handoff_request, decode_open_answer
from muser_wire.schedule import ScheduleRequest, Segment, WindowPolicy, build_schedule

TWO_GIB_CLAIM = b"\xff\xff\xff\xff\x07"
"""The length 2^31 - 1 as a varint."""

SMALL_NBYTES = 1 << 20


@pytest.mark.parametrize("prefix", [b"\x0a", b"\x0a\x04\x08\x02\x10\x00\x12"])
def test_a_frame_that_claims_two_gib_costs_no_memory(prefix: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(FrameError):
        parse_frame(prefix + TWO_GIB_CLAIM + bytes(64))
    assert tracemalloc.get_traced_memory()[1] < SMALL_NBYTES
    tracemalloc.stop()


@pytest.mark.parametrize("decode", [decode_description, decode_handoff_request, decode_open_answer])
@pytest.mark.parametrize("tag", range(1, 16))
def test_a_message_that_claims_two_gib_costs_no_memory(decode: object, tag: int) -> None:
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        decode(bytes([tag << 3 | 2]) + TWO_GIB_CLAIM + bytes(64))  # type: ignore[operator]
    assert tracemalloc.get_traced_memory()[1] < SMALL_NBYTES
    tracemalloc.stop()


@given(st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=40)), max_size=30))
def test_no_nonce_is_used_twice(frames: list[tuple[FrameKind, bytes]]) -> None:
    used: list[int] = []

    class Recording(FrameCipher):
        def encrypt_into(self, position: int, *rest: object) -> None:
            used.append(position)
            super().encrypt_into(position, *rest)  # type: ignore[arg-type]

    writer = FrameWriter(bytes(32), bytes(16))
    writer._cipher = Recording(bytes(32))
    for kind, payload in frames:
        writer.write(kind, payload)
    assert used == list(range(len(frames)))


def test_a_handoff_of_more_than_four_gib_has_right_places_and_counts() -> None:
    # Geometry of Muse Glimmer's width; positions and totals beyond 32 bits, without the bytes themselves.
    geometry = Geometry(windows=(None,) * 52, kv_heads=2, head_dim=128, element=ElementType.F16)
    schedule = build_schedule(ScheduleRequest(geometry, 131_072, 0, 2048, WindowPolicy.ROLLING))
    assert schedule.payload_nbytes == 52 * 1024 * 131_071 > 1 << 32
    assert sum(segment.nbytes for segment in schedule.segments) == schedule.payload_nbytes
    assert [segment.index for segment in schedule.segments] == list(range(len(schedule.segments)))


@pytest.mark.slow
def test_more_than_four_gib_cross_in_one_handoff() -> None:
    geometry = Geometry(windows=(None,) * 4, kv_heads=8, head_dim=256, element=ElementType.F16)
    schedule = build_schedule(ScheduleRequest(geometry, 135_001, 0, 4096, WindowPolicy.ROLLING))
    assert schedule.payload_nbytes > 1 << 32
    nothing = Digest(bytes(32))
    identities = Identities(nothing, nothing, "kv1/f16", "native", nothing, 4096, nothing)
    terms = Terms(os.urandom(16), identities, os.urandom(16), schedule)
    secret, key = os.urandom(32), NodeKey(Ed25519PrivateKey.generate())
    producer, consumer = ProducerHandoff(terms, secret, key), ConsumerHandoff(terms, secret, key.public_bytes)
    staging = bytearray(4 << 20)
    payload = os.urandom(1 << 20)

    def destination(segment: Segment) -> memoryview:
        return memoryview(staging)[: segment.nbytes]

    consumer.receive(producer.begin(), destination)
    for segment in schedule.segments:
        consumer.receive(producer.segment(segment, payload[: segment.nbytes]), destination)
        assert staging[: segment.nbytes] == payload[: segment.nbytes]
    event = consumer.receive(producer.seal(1), destination)
    assert isinstance(event, Sealed)
    assert event.seal.payload_nbytes == schedule.payload_nbytes
    consumer.end_of_input()


def test_a_frame_at_a_position_beyond_32_bits_is_refused_out_of_place() -> None:
    reader = FrameReader(bytes(32), bytes(16))
    with pytest.raises(FrameError):
        reader.parse(b"\x0a\x08\x08\x02\x10\xff\xff\xff\xff\x1f" + b"\x12\x10" + bytes(16))
