"""Both state machines joined in memory: a legal run, then the same run with one fault [7]."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from muser_wire.errors import (
    FrameError,
    HandoffAborted,
    IdentityMismatch,
    LocalProtocolError,
    RemoteProtocolError,
    SealError,
    TransportError,
    WireError,
)
from muser_wire.handoff import TRANSITIONS, Begun, HandoffState, Sealed, SegmentVerified
from muser_wire.identities import Digest
from muser_wire.messages import FrameKind
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule

# Whole-run tests walk over every place of this many frames: begin, segments, seal.
SEGMENTS = 6
FRAMES = SEGMENTS + 2
PLACES = range(FRAMES)


def test_a_legal_run_delivers_every_plane_and_seals(run: Any) -> None:
    events = run.feed(run.frames())
    assert isinstance(events[0], Begun)
    assert [type(event) for event in events[1:-1]] == [SegmentVerified] * SEGMENTS
    assert isinstance(events[-1], Sealed)
    assert (events[-1].prefill_ns, events[-1].reused_tokens) == (7, 3)
    segments = run.terms.schedule.segments
    assert run.received == {s.index: run.payload(s) for s in segments}
    assert sum(map(len, run.received.values())) == run.terms.schedule.payload_nbytes


@pytest.mark.parametrize("place", PLACES)
def test_drop(run: Any, place: int) -> None:
    frames = run.frames()
    del frames[place]
    with pytest.raises(WireError) as caught:
        run.feed(frames)
    assert isinstance(caught.value, TransportError if place == FRAMES - 1 else FrameError)


@pytest.mark.parametrize("place", PLACES)
def test_repeat(run: Any, place: int) -> None:
    frames = run.frames()
    frames.insert(place, frames[place])
    with pytest.raises(FrameError):
        run.feed(frames)


@pytest.mark.parametrize("place", range(FRAMES - 1))
def test_swap(run: Any, place: int) -> None:
    frames = run.frames()
    frames[place], frames[place + 1] = frames[place + 1], frames[place]
    with pytest.raises(FrameError):
        run.feed(frames)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["header", "body", "tag"])
def test_flip(run: Any, place: int, where: str) -> None:
    frames = run.frames()
    raw = bytearray(frames[place])
    raw[{"header": 3, "body": len(raw) // 2, "tag": -1}[where]] ^= 4
    frames[place] = bytes(raw)
    with pytest.raises(FrameError):
        run.feed(frames)


@pytest.mark.parametrize("place", PLACES)
def test_truncate(run: Any, place: int) -> None:
    frames = run.frames()
    frames[place] = frames[place][:-1]
    with pytest.raises(FrameError):
        run.feed(frames)


@pytest.mark.parametrize("place", PLACES)
def test_extend(run: Any, place: int) -> None:
    frames = run.frames()
    frames[place] += b"\x00"
    with pytest.raises(FrameError):
        run.feed(frames)


@pytest.mark.parametrize("place", PLACES)
def test_close(run: Any, place: int) -> None:
    with pytest.raises(TransportError, match="without a seal"):
        run.feed(run.frames()[:place])


def test_seal_early(run: Any) -> None:
    producer = run.producer()
    producer.begin()
    with pytest.raises(LocalProtocolError, match="0 of 6"):
        producer.seal(0)
    assert producer.state is HandoffState.BROKEN


def test_seal_early_by_a_producer_that_breaks_the_rules(run: Any) -> None:
    producer = run.producer()
    frames = [producer.begin()]
    producer._machine.next_segment = SEGMENTS
    frames.append(producer.seal(0))
    with pytest.raises(SealError, match="0 of 6"):
        run.feed(frames)


def test_seal_twice(run: Any) -> None:
    producer = run.producer()
    frames = [producer.begin(), *(producer.segment(s, run.payload(s)) for s in run.terms.schedule.segments)]
    frames.append(producer.seal(0))
    with pytest.raises(LocalProtocolError, match="cannot come when the handoff is sealed"):
        producer.seal(0)
    producer._machine.state = HandoffState.STREAMING
    frames.append(producer.seal(0))
    with pytest.raises(FrameError, match="seal frame cannot come when the handoff is sealed"):
        run.feed(frames)


def test_frames_after_the_seal(run: Any) -> None:
    producer = run.producer()
    frames = [producer.begin(), *(producer.segment(s, run.payload(s)) for s in run.terms.schedule.segments)]
    frames.append(producer.seal(0))
    producer._machine.state = HandoffState.STREAMING
    frames.append(producer.abort("late", "after the seal"))
    with pytest.raises(FrameError, match="abort frame cannot come when the handoff is sealed"):
        run.feed(frames)


def test_another_handoffs_frames(make_run: Any) -> None:
    run, other = make_run(), make_run()
    other.secret = run.secret
    frames = run.frames()
    frames[2] = other.frames()[2]
    with pytest.raises(FrameError, match="not authentic"):
        run.feed(frames)


def test_an_old_handoff_replayed(make_run: Any) -> None:
    old, fresh = make_run(), make_run()
    fresh.node_key = old.node_key
    with pytest.raises(FrameError, match="not authentic"):
        fresh.feed(old.frames())


def test_a_seal_signed_by_another_key(make_run: Any) -> None:
    run, other = make_run(), make_run()
    frames = run.frames()
    run.node_key = other.node_key
    with pytest.raises(SealError, match="not signed by its producer"):
        run.feed(frames)


@pytest.mark.parametrize(
    "name",
    ["spec_digest", "tokenizer_digest", "kv_layout", "lane", "numerics_digest", "chunk_tokens", "weights_digest"],
)
def test_a_begin_that_names_another(make_run: Any, name: str) -> None:
    ours = make_run().terms.identities
    other = {str: "other", int: 3, bytes: Digest(b"x" * 32)}[type(getattr(ours, name))]
    run = make_run(identities=dataclasses.replace(ours, **{name: other}))
    with pytest.raises(IdentityMismatch) as caught:
        run.feed(run.frames())
    assert caught.value.name == name


def test_a_begin_that_names_another_incarnation(make_run: Any) -> None:
    run = make_run(incarnation=b"j" * 16)
    with pytest.raises(IdentityMismatch, match="incarnation differs"):
        run.feed(run.frames())


def test_a_begin_that_names_another_schedule(run: Any) -> None:
    request = run.terms.schedule.request
    longer = ScheduleRequest(request.geometry, 6, 0, 2, WindowPolicy.ROLLING)
    run.producer_terms = dataclasses.replace(run.terms, schedule=build_schedule(longer))
    with pytest.raises(IdentityMismatch, match="schedule_digest differs"):
        run.feed(run.frames())


def test_weights_may_differ_only_where_the_operator_says_so(make_run: Any) -> None:
    ours = make_run().terms.identities
    run = make_run(identities=dataclasses.replace(ours, weights_digest=Digest(b"x" * 32)))
    consumer = type(run.consumer())(run.terms, run.secret, run.node_key.public_bytes, allow_unqualified=True)
    assert isinstance(consumer.receive(run.frames()[0], lambda segment: memoryview(b"")), Begun)


def test_an_abort_says_why(run: Any) -> None:
    producer = run.producer()
    frames = [producer.begin(), producer.abort("prefill_failed", "out of memory")]
    with pytest.raises(HandoffAborted, match="out of memory") as caught:
        run.feed(frames)
    assert caught.value.reason == "prefill_failed"


@pytest.mark.parametrize("change", ["index", "size", "extra"])
def test_the_producer_refuses_to_build_a_wrong_segment(run: Any, change: str) -> None:
    producer, segments = run.producer(), run.terms.schedule.segments
    producer.begin()
    if change == "extra":
        for segment in segments:
            producer.segment(segment, run.payload(segment))
    segment = segments[1] if change == "index" else segments[0]
    payload = run.payload(segment) + (b"x" if change == "size" else b"")
    with pytest.raises(LocalProtocolError):
        producer.segment(segment, payload)
    assert producer.state is HandoffState.BROKEN


def test_after_a_fault_nothing_is_accepted_any_more(run: Any) -> None:
    frames, consumer = run.frames(), run.consumer()
    with pytest.raises(FrameError):
        consumer.receive(frames[1], lambda segment: memoryview(bytearray(segment.nbytes)))
    assert consumer.state is HandoffState.BROKEN
    with pytest.raises(RemoteProtocolError, match="when the handoff is broken"):
        consumer.receive(frames[0], lambda segment: memoryview(bytearray(segment.nbytes)))
    with pytest.raises(TransportError):
        consumer.end_of_input()


def test_every_transition_that_is_not_in_the_table_breaks(make_run: Any) -> None:
    for state in HandoffState:
        for kind in FrameKind:
            machine = make_run().producer()._machine
            machine.state = state
            if (state, kind) in TRANSITIONS:
                machine.apply(kind, LocalProtocolError)
                assert machine.state is TRANSITIONS[state, kind]
            else:
                with pytest.raises(LocalProtocolError):
                    machine.apply(kind, LocalProtocolError)
                assert machine.state is HandoffState.BROKEN


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, ValueError])
def test_any_exception_breaks_the_handoff(run: Any, error: type[BaseException]) -> None:
    frames, consumer = run.frames(), run.consumer()

    def no_memory(segment: Any) -> memoryview:
        raise error

    consumer.receive(frames[0], no_memory)
    with pytest.raises(error):
        consumer.receive(frames[1], no_memory)
    assert consumer.state is HandoffState.BROKEN
    with pytest.raises(TransportError):
        consumer.end_of_input()


def test_a_seal_that_does_not_verify_is_never_a_sealed_state(run: Any) -> None:
    consumer = type(run.consumer())(run.terms, run.secret, b"no key of 32 bytes")
    *before, seal = run.frames()
    for raw in before:
        consumer.receive(raw, lambda segment: memoryview(bytearray(segment.nbytes)))
    with pytest.raises(SealError):
        consumer.receive(seal, lambda segment: memoryview(b""))
    assert consumer.state is HandoffState.BROKEN
    with pytest.raises(TransportError):
        consumer.end_of_input()
