"""The faults of a handoff's frames, through both real nodes: the answer stays, and says what was wrong.

A producer that breaks the rules is a forger here: it holds all that the real one does (secret, node key, computed
planes) and writes other frames with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_decode.engine.request import Route
from muser_wire.auth import NodeKey
from muser_wire.handoff import ConsumerHandoff, HandoffState, ProducerHandoff, SegmentVerified, Terms
from muser_wire.identities import Digest
from muser_wire.messages import decode_handoff_request
from muser_wire.schedule import ScheduleRequest, Segment, WindowPolicy, build_schedule

SEGMENTS = 4
FRAMES = SEGMENTS + 2
PLACES = range(FRAMES)
KEPT = (0, 0, 64, 128, 192, 199)
"""Tokens of the whole chunks that came before each place: begin, four chunks, seal."""

Frames = list[bytes]


class Forger:
    """One legal handoff, and everything that it takes to write another in its place."""

    def __init__(self, pair: Any, frames: Iterator[bytes]) -> None:
        service, request = pair.service.inner, decode_handoff_request(pair.service.request)
        wanted = ScheduleRequest(service._facts.geometry, len(request.token_ids), 0, 64, WindowPolicy.ROLLING)
        self.secret, self.node_key = request.secret, service._node_key
        self.terms = Terms(request.handoff_id, service._facts.identities, request.incarnation, build_schedule(wanted))
        self.frames = list(frames)
        assert len(self.frames) == FRAMES
        self.payloads = self._read()

    def _read(self) -> dict[int, bytes]:
        consumer = ConsumerHandoff(self.terms, self.secret, self.node_key.public_bytes)
        payloads = {}
        for frame in self.frames:
            memory = bytearray(1 << 20)

            def destination(segment: Segment, memory: bytearray = memory) -> memoryview:
                return memoryview(memory)[: segment.nbytes]

            event = consumer.receive(frame, destination)
            if isinstance(event, SegmentVerified):
                payloads[event.segment.index] = bytes(memory[: event.segment.nbytes])
        assert consumer.state is HandoffState.SEALED
        return payloads

    def producer(self, **changes: Any) -> ProducerHandoff:
        """The producer's side anew; `changes` are put into its terms."""
        return ProducerHandoff(dataclasses.replace(self.terms, **changes), self.secret, self.node_key)

    def written(self, producer: ProducerHandoff, segments: int = SEGMENTS) -> Frames:
        """Begin and so many segments."""
        begin = producer.begin()
        return [begin, *(producer.segment(s, self.payloads[s.index]) for s in self.terms.schedule.segments[:segments])]


def drop(place: int) -> Callable[[Forger], Frames]:
    return lambda forger: [*forger.frames[:place], *forger.frames[place + 1 :]]


def repeat(place: int) -> Callable[[Forger], Frames]:
    return lambda forger: [*forger.frames[: place + 1], *forger.frames[place:]]


def swap(place: int) -> Callable[[Forger], Frames]:
    return lambda forger: [
        *forger.frames[:place],
        forger.frames[place + 1],
        forger.frames[place],
        *forger.frames[place + 2 :],
    ]


def truncate(place: int) -> Callable[[Forger], Frames]:
    return lambda forger: [*forger.frames[:place], forger.frames[place][:-1], *forger.frames[place + 1 :]]


def extend(place: int) -> Callable[[Forger], Frames]:
    return lambda forger: [*forger.frames[:place], forger.frames[place] + b"\x00", *forger.frames[place + 1 :]]


def flip(place: int, byte: int, bit: int) -> Callable[[Forger], Frames]:
    """Of a frame `byte` 3 is its header's kind, byte 5 its position."""

    def forged(forger: Forger) -> Frames:
        altered = bytearray(forger.frames[place])
        altered[byte] ^= bit
        return [*forger.frames[:place], bytes(altered), *forger.frames[place + 1 :]]

    return forged


def seal_early(segments: int) -> Callable[[Forger], Frames]:
    def forged(forger: Forger) -> Frames:
        producer = forger.producer()
        frames = forger.written(producer, segments)
        producer._machine.next_segment = SEGMENTS
        return [*frames, producer.seal(0)]

    return forged


def seal_twice(forger: Forger) -> Frames:
    producer = forger.producer()
    frames = [*forger.written(producer), producer.seal(0)]
    producer._machine.state = HandoffState.STREAMING
    return [*frames, producer.seal(0)]


def abort_after_the_seal(forger: Forger) -> Frames:
    producer = forger.producer()
    frames = [*forger.written(producer), producer.seal(0)]
    producer._machine.state = HandoffState.STREAMING
    return [*frames, producer.abort("late", "after the seal")]


def segment_after_the_seal(forger: Forger) -> Frames:
    producer = forger.producer()
    frames = [*forger.written(producer), producer.seal(0)]
    producer._machine.state, producer._machine.next_segment = HandoffState.STREAMING, SEGMENTS - 1
    return [*frames, producer.segment(forger.terms.schedule.segments[-1], forger.payloads[SEGMENTS - 1])]


def abort(segments: int) -> Callable[[Forger], Frames]:
    def forged(forger: Forger) -> Frames:
        producer = forger.producer()
        return [*forger.written(producer, segments), producer.abort("prefill_failed", "out of memory")]

    return forged


def one_frame_of_another_handoff(forger: Forger) -> Frames:
    other = forger.written(forger.producer(handoff_id=b"another handoff."))
    return [*forger.frames[:2], other[2], *forger.frames[3:]]


def sealed_by_another_key(forger: Forger) -> Frames:
    forger.node_key = NodeKey(Ed25519PrivateKey.generate())
    producer = forger.producer()
    return [*forger.written(producer), producer.seal(0)]


def begin_naming(**changes: Any) -> Callable[[Forger], Frames]:
    def forged(forger: Forger) -> Frames:
        producer = forger.producer(**changes)
        return [*forger.written(producer), producer.seal(0)]

    return forged


def begin_with_identity(name: str) -> Callable[[Forger], Frames]:
    def forged(forger: Forger) -> Frames:
        ours = forger.terms.identities
        other = {str: "other", int: 3, bytes: Digest(b"x" * 32)}[type(getattr(ours, name))]
        return begin_naming(identities=dataclasses.replace(ours, **{name: other}))(forger)

    return forged


def begin_with_a_longer_schedule(forger: Forger) -> Frames:
    request = forger.terms.schedule.request
    longer = dataclasses.replace(request, prompt_tokens=request.prompt_tokens + 1)
    return [forger.producer(schedule=build_schedule(longer)).begin(), *forger.frames[1:]]


def begin_with_another_window_policy(forger: Forger) -> Frames:
    request = dataclasses.replace(forger.terms.schedule.request, policy=WindowPolicy.FINAL)
    return [forger.producer(schedule=build_schedule(request)).begin(), *forger.frames[1:]]


def due(place: int, sent: int) -> str:
    return f"frame {place} was due, the peer sent {sent}"


IDENTITIES = (
    "spec_digest",
    "tokenizer_digest",
    "kv_layout",
    "lane",
    "numerics_digest",
    "chunk_tokens",
    "weights_digest",
)
NO_SEAL = "the stream ended after 4 of 4 segments, without a seal"
AFTER_SEAL = "frame cannot come when the handoff is sealed"
CASES: list[Any] = [
    *(pytest.param(drop(p), KEPT[p], due(p, p + 1), id=f"drop-{p}") for p in PLACES[:-1]),
    pytest.param(drop(5), 199, NO_SEAL, id="drop-5"),
    *(pytest.param(repeat(p), ([*KEPT, 199])[p + 1], due(p + 1, p), id=f"repeat-{p}") for p in PLACES),
    *(pytest.param(swap(p), KEPT[p], due(p, p + 1), id=f"swap-{p}") for p in PLACES[:-1]),
    *(pytest.param(truncate(p), KEPT[p], "does not fit the frame", id=f"truncate-{p}") for p in PLACES),
    *(pytest.param(extend(p), KEPT[p], "1 bytes follow the frame", id=f"extend-{p}") for p in PLACES),
    *(pytest.param(flip(p, 3, 8), KEPT[p], "FrameHeader.kind", id=f"flip-kind-{p}") for p in PLACES),
    *(pytest.param(flip(p, 5, 4), KEPT[p], due(p, p ^ 4), id=f"flip-position-{p}") for p in PLACES),
    *(pytest.param(flip(p, -1, 1), KEPT[p], "not authentic", id=f"flip-tag-{p}") for p in PLACES),
    *(
        pytest.param(seal_early(n), KEPT[n + 1], f"sealed after {n} of 4 segments", id=f"seal-early-{n}")
        for n in range(SEGMENTS)
    ),
    pytest.param(seal_twice, 199, f"seal {AFTER_SEAL}", id="seal-twice"),
    pytest.param(abort_after_the_seal, 199, f"abort {AFTER_SEAL}", id="abort-after-the-seal"),
    pytest.param(segment_after_the_seal, 199, f"segment {AFTER_SEAL}", id="segment-after-the-seal"),
    *(pytest.param(abort(n), KEPT[n + 1], "out of memory", id=f"abort-{n}") for n in range(SEGMENTS + 1)),
    pytest.param(one_frame_of_another_handoff, 64, "not authentic", id="another-handoffs-frame"),
    pytest.param(sealed_by_another_key, 199, "not signed by its producer", id="sealed-by-another-key"),
    *(pytest.param(begin_with_identity(name), 0, f"{name} differs", id=f"begin-{name}") for name in IDENTITIES),
    pytest.param(begin_naming(incarnation=b"j" * 16), 0, "incarnation differs", id="begin-incarnation"),
    pytest.param(begin_with_a_longer_schedule, 0, "schedule_digest differs", id="begin-longer-schedule"),
    pytest.param(begin_with_another_window_policy, 0, "schedule_digest differs", id="begin-window-policy"),
]


def check_kept(pair: Any, local_answer: Any, answer: Any, kept: int, named: str) -> None:
    """The answer is the local one, made of the whole chunks before the fault; the next one is remote again."""
    assert answer.tokens == local_answer.tokens
    report = answer.report
    assert report.route is (Route.SALVAGED if kept else Route.LOCAL)
    assert (report.remote_tokens, report.local_tokens) == (kept, 199 - kept)
    assert named in report.reason
    again = pair.ask()
    assert again.tokens == local_answer.tokens
    assert (again.report.route, again.report.remote_tokens, again.report.reason) == (Route.REMOTE, 199, "")


def test_forged_frames_that_break_no_rule_are_a_remote_answer(pair: Any, local_answer: Any) -> None:
    def honest(frames: Iterator[bytes]) -> Iterator[bytes]:
        forger = Forger(pair, frames)
        producer = forger.producer()
        yield from [*forger.written(producer), producer.seal(0)]

    answer = pair.ask(fault=honest)
    assert (answer.tokens, answer.report.route) == (local_answer.tokens, Route.REMOTE)
    assert answer.report.segments_verified == SEGMENTS


@pytest.mark.parametrize(("forged", "kept", "named"), CASES)
def test_a_fault_in_the_frames(pair: Any, local_answer: Any, forged: Any, kept: int, named: str) -> None:
    answer = pair.ask(fault=lambda frames: iter(forged(Forger(pair, frames))))
    check_kept(pair, local_answer, answer, kept, named)


@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_an_old_handoff_replayed(pair: Any, local_answer: Any, place: int) -> None:
    old: Frames = []

    def record(frames: Iterator[bytes]) -> Iterator[bytes]:
        for frame in frames:
            old.append(frame)
            yield frame

    def replay(frames: Iterator[bytes]) -> Iterator[bytes]:
        fresh = list(frames)
        yield from [*fresh[:place], *old[place:]]

    assert pair.ask(fault=record).report.route is Route.REMOTE
    assert len(old) == FRAMES
    check_kept(pair, local_answer, pair.ask(fault=replay), KEPT[place], "not authentic")
