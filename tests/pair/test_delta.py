"""A delta of Muse Glimmer's size over both machines: every byte is sealed, opened and counted, planes from memory."""

from __future__ import annotations

import os

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_wire.auth import NodeKey
from muser_wire.geometry import ElementType, Geometry, kv_layout
from muser_wire.handoff import ConsumerHandoff, ProducerHandoff, Sealed, SegmentVerified, Terms
from muser_wire.identities import Digest, Identities
from muser_wire.schedule import ScheduleRequest, Segment, WindowPolicy, build_schedule

GLIMMER = Geometry(
    windows=tuple(None if layer % 4 == 3 else 2048 for layer in range(52)),
    kv_heads=2,
    head_dim=128,
    element=ElementType.F16,
)
PROMPT_TOKENS, CHUNK_TOKENS = 65_536, 2048
TOKEN_NBYTES = 2 * 2 * 128 * 2
"""One token in one layer: keys and values of 2 heads of 128, two bytes each."""

FULL_LAYERS, SLIDING_LAYERS, WINDOW = 13, 39, 2048
MEMORY_NBYTES = 8 << 20
"""Planes are read from a ring of so many random bytes: larger than any segment."""


def terms(held_tokens: int, policy: WindowPolicy) -> Terms:
    digest = Digest(b"d" * 32)
    identities = Identities(digest, digest, kv_layout(ElementType.F16), "native", digest, CHUNK_TOKENS, digest)
    request = ScheduleRequest(GLIMMER, PROMPT_TOKENS, held_tokens, CHUNK_TOKENS, policy)
    return Terms(os.urandom(16), identities, b"i" * 16, build_schedule(request))


def moved_nbytes(held_tokens: int, policy: WindowPolicy) -> int:
    """Run a whole handoff; return how many verified plane bytes came out, each compared with what went in."""
    agreed, secret, key = terms(held_tokens, policy), os.urandom(32), NodeKey(Ed25519PrivateKey.generate())
    producer, consumer = ProducerHandoff(agreed, secret, key), ConsumerHandoff(agreed, secret, key.public_bytes)
    planes = memoryview(os.urandom(MEMORY_NBYTES))
    out, moved = bytearray(MEMORY_NBYTES), 0

    def place(segment: Segment) -> memoryview:
        return memoryview(out)[: segment.nbytes]

    consumer.receive(producer.begin(), place)
    for segment in agreed.schedule.segments:
        at = segment.index * 4096 % (MEMORY_NBYTES - segment.nbytes)
        half = segment.nbytes // 2
        frame = producer.segment(segment, planes[at : at + half], planes[at + half : at + segment.nbytes])
        event = consumer.receive(frame, place)
        assert event == SegmentVerified(segment)
        assert out[: segment.nbytes] == planes[at : at + segment.nbytes]
        moved += segment.nbytes
    sealed = consumer.receive(producer.seal(prefill_ns=1, reused_tokens=held_tokens), place)
    assert isinstance(sealed, Sealed)
    assert (sealed.seal.payload_nbytes, sealed.reused_tokens) == (moved, held_tokens)
    consumer.end_of_input()
    return moved


@pytest.mark.parametrize(("held_tokens", "nbytes"), [(0, 954_190_848), (32_768, 517_983_232)])
def test_half_a_prompt_that_is_held_does_not_move_again(held_tokens: int, nbytes: int) -> None:
    """The last prompt token is held back; of a sliding layer the last window moves."""
    rest = PROMPT_TOKENS - 1 - held_tokens
    assert nbytes == (FULL_LAYERS * rest + SLIDING_LAYERS * WINDOW) * TOKEN_NBYTES
    assert moved_nbytes(held_tokens, WindowPolicy.FINAL) == nbytes


def test_a_rolling_delta_is_every_token_of_every_layer_that_is_lacking() -> None:
    """The window is as long as a chunk, so each chunk's windows are all of its tokens."""
    held_tokens = PROMPT_TOKENS - 4 * CHUNK_TOKENS
    expected = (PROMPT_TOKENS - 1 - held_tokens) * (FULL_LAYERS + SLIDING_LAYERS) * TOKEN_NBYTES
    assert moved_nbytes(held_tokens, WindowPolicy.ROLLING) == expected
