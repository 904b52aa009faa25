"""The source over a handoff: whatever happens, a staging slot is never lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_decode.client import OpenedHandoff
from muser_decode.engine.source import SlotPool, SourceDone, SourceFailed, StagedChunk, StagingSlot
from muser_decode.ingest import RemoteSource
from muser_decode.observer import HandoffEnd, Unobserved
from muser_decode.standing import Standing
from muser_wire.auth import NodeKey
from muser_wire.errors import FrameError, HandoffRefused, TransportError, WireError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.handoff import ConsumerHandoff, ProducerHandoff, Terms
from muser_wire.identities import Digest, Identities
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule

WAIT_S = 10.0
SLOTS = 2
GEOMETRY = Geometry(windows=(None, None), kv_heads=1, head_dim=8, element=ElementType.F16)
CHUNKS = 2


class Stream:
    """A legal handoff's frames; `before` is called with the index of each frame before it is given out."""

    def __init__(self, frames: list[bytes], before: Callable[[int], None]) -> None:
        self._frames, self._before = frames, before
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        for index, frame in enumerate(self._frames):
            self._before(index)
            yield frame

    def cancel(self) -> None:
        self.cancelled.set()


class Counting(Unobserved):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ends: list[HandoffEnd] = []

    def handoff_ended(self, end: HandoffEnd) -> None:
        self.ends.append(end)


class Client:
    """Opens one legal handoff, as `ProducerClient.open` does; `refusal` instead, if there is one."""

    def __init__(self, before: Callable[[int], None] = lambda index: None, refusal: WireError | None = None) -> None:
        self.name, self.standing, self.refusal = "p:1", Standing(), refusal
        self.looked = threading.Event()
        nothing = Digest(bytes(32))
        identities = Identities(nothing, nothing, "kv1/f16", "native", nothing, 4, nothing)
        schedule = build_schedule(ScheduleRequest(GEOMETRY, 9, 0, 4, WindowPolicy.ROLLING))
        terms = Terms(os.urandom(16), identities, bytes(16), schedule)
        secret, key = os.urandom(32), NodeKey(Ed25519PrivateKey.generate())
        producer = ProducerHandoff(terms, secret, key)
        frames = [producer.begin()]
        frames += [producer.segment(s, bytes([s.index + 1]) * s.nbytes) for s in schedule.segments]
        frames.append(producer.seal(1))
        self.stream = Stream(frames, before)
        self.opened = OpenedHandoff(
            ConsumerHandoff(terms, secret, key.public_bytes),
            schedule,
            self.stream,
            predicted_chunk_s=1.0,
            predicted_wait_s=0.0,
        )

    def open(self, prompt_ids: object, held_tokens: int = 0) -> OpenedHandoff:
        if self.refusal is not None:
            raise self.refusal
        return self.opened

    def look(self) -> None:
        self.looked.set()


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool((StagingSlot(index, memoryview(bytearray(4096))) for index in range(SLOTS)), lambda: None)


def free_slots(pool: SlotPool) -> int:
    taken = []
    deadline = time.monotonic() + WAIT_S
    while len(taken) < SLOTS and time.monotonic() < deadline:
        slot = pool.acquire(0.05)
        if slot is not None:
            taken.append(slot)
    for slot in taken:
        pool.release(slot)
    return len(taken)


def begun(client: Client, pool: SlotPool, observer: Counting | None = None) -> RemoteSource:
    source = RemoteSource(client, range(9), 0, observer)  # type: ignore[arg-type]
    source.begin(pool)
    return source


def ingest_ended() -> bool:
    return not any(thread.name == "ingest" for thread in threading.enumerate())


def settled(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not what() and time.monotonic() < deadline:
        time.sleep(0.005)
    return what()


def test_every_chunk_is_staged_in_order_and_then_the_seal(pool: SlotPool) -> None:
    source = begun(Client(), pool)
    seen: list[object] = []
    while not isinstance(seen[-1] if seen else None, SourceDone):
        item = source.poll()
        if item is None:
            time.sleep(0.001)
            continue
        seen.append(item)
        if isinstance(item, StagedChunk):
            first = item.pieces[0]
            assert item.slot.memory[first.k_offset_nbytes] == item.start // 4 + 1
            pool.release(item.slot)
    chunks = [item for item in seen if isinstance(item, StagedChunk)]
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 4), (4, 8)]
    assert free_slots(pool) == SLOTS


def test_a_cancel_after_the_end_and_before_any_poll_gives_every_slot_back(pool: SlotPool) -> None:
    source = begun(Client(), pool)
    assert settled(ingest_ended)
    source.cancel()
    assert source.poll() is None
    assert free_slots(pool) == SLOTS
    source.cancel()
    assert free_slots(pool) == SLOTS


@pytest.mark.parametrize("frame", range(CHUNKS + 2))
def test_a_cancel_before_any_frame_gives_every_slot_back(pool: SlotPool, frame: int) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(index: int) -> None:
        if index == frame:
            reached.set()
            go_on.wait(WAIT_S)

    client = Client(before)
    source = begun(client, pool)
    assert reached.wait(WAIT_S)
    source.cancel()
    # Before the begin frame the call is left to reach the producer, whose ticket it must use up.
    assert client.stream.cancelled.is_set() == (frame > 0)
    go_on.set()
    assert settled(ingest_ended)
    assert client.stream.cancelled.is_set()
    assert source.poll() is None
    assert free_slots(pool) == SLOTS


def test_a_cancel_while_it_waits_for_memory_ends_it(pool: SlotPool) -> None:
    held = [pool.acquire(1.0) for _ in range(SLOTS)]
    source = begun(Client(), pool)
    time.sleep(0.05)
    source.cancel()
    assert settled(ingest_ended)
    for slot in held:
        assert slot is not None
        pool.release(slot)
    assert free_slots(pool) == SLOTS


def test_memory_that_never_comes_free_is_a_failure_with_a_name(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_decode.ingest.SLOT_WAIT_S", 0.2)
    held = [pool.acquire(1.0) for _ in range(SLOTS)]
    source = begun(Client(), pool)
    assert settled(ingest_ended)
    failed = source.poll()
    assert isinstance(failed, SourceFailed)
    assert "no staging memory became free" in failed.reason
    assert failed.code == "no_staging_memory"
    assert len(held) == SLOTS


def test_a_fault_nobody_expected_is_still_reported(pool: SlotPool) -> None:
    def before(index: int) -> None:
        if index == 1:
            raise ValueError("a bug")

    source = begun(Client(before), pool)
    assert settled(ingest_ended)
    failed = source.poll()
    assert isinstance(failed, SourceFailed)
    assert failed.reason == "internal: ValueError"
    assert free_slots(pool) == SLOTS


def test_a_cancel_does_not_wait_for_a_producer_that_never_begins(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muser_decode.ingest.CANCEL_GRACE_S", 0.1)
    client = Client()

    def before(index: int) -> None:
        client.stream.cancelled.wait(WAIT_S)
        raise TransportError("cancelled")

    client.stream._before = before
    source = begun(client, pool)
    time.sleep(0.05)
    source.cancel()
    assert client.stream.cancelled.wait(WAIT_S)
    assert settled(ingest_ended)
    assert free_slots(pool) == SLOTS


def test_a_whole_handoff_is_told_to_the_producer_s_standing_and_counted(pool: SlotPool) -> None:
    client, observer = Client(), Counting()
    client.standing.failed(time.monotonic())
    begun(client, pool, observer)
    assert settled(ingest_ended)
    now_s = time.monotonic()
    assert (client.standing.resting_s(now_s), client.standing.tokens_since(0.0)) == (0.0, 0)
    assert client.standing.link_nbytes_per_s(now_s)
    assert not client.looked.is_set()
    (end,) = observer.ends
    # 8 tokens, 2 layers, keys and values, one head of 8, 2 bytes; a segment for each chunk.
    assert (end.producer, end.code, end.frame_refused) == ("p:1", "sealed", False)
    assert (end.segments_verified, end.payload_nbytes) == (CHUNKS, 8 * 2 * 2 * 8 * 2)
    assert end.seconds > 0


@pytest.mark.parametrize(
    ("error", "code", "blamed", "frame"),
    [
        (TransportError("gone"), "transport", True, False),
        (FrameError("not authentic"), "frame", True, True),
        (HandoffRefused("busy", "later"), "refused_busy", False, False),
        (HandoffRefused("of the peer's own making", "x"), "refused", False, False),
    ],
)
def test_a_handoff_that_breaks_is_counted_by_a_stable_code(
    pool: SlotPool, error: WireError, code: str, blamed: bool, frame: bool
) -> None:
    client, observer = Client(refusal=error), Counting()
    source = begun(client, pool, observer)
    assert settled(ingest_ended)
    failed = source.poll()
    assert isinstance(failed, SourceFailed)
    assert failed.code == code
    assert [(end.code, end.frame_refused) for end in observer.ends] == [(code, frame)]
    assert (client.standing.resting_s(time.monotonic()) > 0, client.looked.is_set()) == (blamed, blamed)


def test_a_cancelled_handoff_is_nobody_s_fault(pool: SlotPool) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def before(index: int) -> None:
        if index == 1:
            reached.set()
            go_on.wait(WAIT_S)

    client, observer = Client(before), Counting()
    source = begun(client, pool, observer)
    assert reached.wait(WAIT_S)
    source.cancel()
    go_on.set()
    assert settled(ingest_ended)
    assert [end.code for end in observer.ends] == ["cancelled"]
    assert client.standing.resting_s(time.monotonic()) == 0.0
