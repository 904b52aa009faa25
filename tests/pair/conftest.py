"""A legal run of one handoff, both state machines joined in memory; tests put one fault into it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_wire.auth import NodeKey
from muser_wire.geometry import ElementType, Geometry, kv_layout
from muser_wire.handoff import ConsumerHandoff, HandoffEvent, ProducerHandoff, Sealed, SegmentVerified, Terms
from muser_wire.identities import Digest, Identities
from muser_wire.schedule import ScheduleRequest, Segment, WindowPolicy, build_schedule

GEOMETRY = Geometry(windows=(None, 8, None), kv_heads=2, head_dim=64 * 1024, element=ElementType.F16)
"""512 KiB a token and layer, so that two tokens of one layer fill a segment: 5 tokens make 6 of them."""


@dataclass
class Run:
    """Both sides of one handoff."""

    terms: Terms
    secret: bytes
    node_key: NodeKey
    producer_terms: Terms
    received: dict[int, bytes] = field(default_factory=dict)

    def producer(self) -> ProducerHandoff:
        return ProducerHandoff(self.producer_terms, self.secret, self.node_key)

    def consumer(self) -> ConsumerHandoff:
        return ConsumerHandoff(self.terms, self.secret, self.node_key.public_bytes)

    def payload(self, segment: Segment) -> bytes:
        return bytes([segment.index % 251 + 1]) * segment.nbytes

    def frames(self) -> list[bytes]:
        """Every frame of a legal run, begin to seal."""
        producer = self.producer()
        body = [producer.begin()]
        body += [producer.segment(s, self.payload(s)) for s in self.producer_terms.schedule.segments]
        return [*body, producer.seal(prefill_ns=7, reused_tokens=3)]

    def feed(self, frames: Iterable[bytes]) -> list[HandoffEvent]:
        """Give frames to a fresh consumer until the input ends; raises as the consumer does."""
        consumer = self.consumer()
        events = []
        for raw in frames:
            memory: dict[int, bytearray] = {}

            def destination(segment: Segment, memory: dict[int, bytearray] = memory) -> memoryview:
                return memoryview(memory.setdefault(segment.index, bytearray(segment.nbytes)))

            event = consumer.receive(raw, destination)
            if isinstance(event, SegmentVerified):
                self.received[event.segment.index] = bytes(memory[event.segment.index])
            events.append(event)
        consumer.end_of_input()
        return events

    def sealed(self, events: list[HandoffEvent]) -> bool:
        return isinstance(events[-1], Sealed)


def identities() -> Identities:
    return Identities(
        spec_digest=Digest(b"s" * 32),
        tokenizer_digest=Digest(b"t" * 32),
        kv_layout=kv_layout(ElementType.F16),
        lane="native",
        numerics_digest=Digest(b"n" * 32),
        chunk_tokens=2,
        weights_digest=Digest(b"w" * 32),
    )


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    """A run of 5 prompt tokens in chunks of 2; `producer_changes` are put into the producer's terms alone."""

    def make(**producer_changes: object) -> Run:
        request = ScheduleRequest(GEOMETRY, 5, 0, 2, WindowPolicy.ROLLING)
        terms = Terms(os.urandom(16), identities(), b"i" * 16, build_schedule(request))
        producer_terms = dataclasses.replace(terms, **producer_changes)
        return Run(terms, os.urandom(32), NodeKey(Ed25519PrivateKey.generate()), producer_terms)

    return make


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    """A legal run."""
    return make_run()
