from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from kvpack_support import CHUNK, FULL, KEY, SLIDING, WIDE, blocks_of, identities, row

from muser_decode.engine.source import HeldEnded, KVSource, Origin, SlotPool, SourceDone, StagedChunk, StagingSlot
from muser_decode.engine.staging import check_chunk
from muser_decode.held import HeldSource, Rest
from muser_decode.keeper import Keeper
from muser_wire.geometry import Geometry
from muser_wire.kvpack import index
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore

IDS = list(range(400, 420))
SLOTS = 2
WAIT_S = 10.0


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


def shelf(geometry: Geometry, ids: list[int] = IDS) -> Keeper:
    """A keeper, not running, over a store that holds a request with these ids."""
    store = BlockStore(Namer(KEY, identities()), geometry, 1 << 20)
    for block in blocks_of(store.namer, geometry, ids):
        assert store.put(block)
    return Keeper(store)


class Pool(SlotPool):
    """Counts the slots that are out."""

    def __init__(self, slot_nbytes: int = 4096, *, direct: bool = False) -> None:
        slots = [StagingSlot(i, memoryview(bytearray(slot_nbytes))) for i in range(SLOTS)]
        super().__init__(slots, lambda: None, direct=direct)
        self.out = 0
        self._guard = threading.Lock()

    def acquire(self, timeout_s: float) -> StagingSlot | None:
        slot = super().acquire(timeout_s)
        with self._guard:
            self.out += slot is not None
        return slot

    def release(self, slot: StagingSlot) -> None:
        with self._guard:
            self.out -= 1
        super().release(slot)


def news(source: HeldSource) -> StagedChunk | HeldEnded | object:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        item = source.poll()
        if item is not None:
            return item
        time.sleep(0.001)
    return pytest.fail("the source said nothing")


def served(source: HeldSource, pool: Pool, geometry: Geometry, ids: list[int]) -> tuple[int, HeldEnded]:
    """Play the engine: check each chunk and every byte of it; return how many tokens came, and the end."""
    length = 0
    source.begin(pool)
    while isinstance(item := news(source), StagedChunk):
        check_chunk(item, geometry, length, len(ids) - 1)
        for piece in item.pieces:
            for plane, offset in (("k", piece.k_offset_nbytes), ("v", piece.v_offset_nbytes)):
                expected = b"".join(row(ids, piece.layer, plane, at, 8) for at in range(piece.start, piece.stop))
                assert bytes(item.memory[offset : offset + len(expected)]) == expected
        assert item.origin is Origin.MEMORY
        length = item.stop
        pool.release(item.slot)
    assert isinstance(item, HeldEnded)
    return length, item


@pytest.mark.parametrize("geometry", [FULL, SLIDING, WIDE])
@pytest.mark.parametrize("common", range(21))
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_staged_is_what_a_handoff_of_these_tokens_would_bring(
    geometry: Geometry, common: int, *, direct: bool
) -> None:
    pool, asked = Pool(direct=direct), []

    def rest(held: int) -> Rest:
        asked.append(held)
        return "stays here"

    ids = [*IDS[:common], 1, 2, 3]
    length, ended = served(HeldSource(shelf(geometry), ids, rest), pool, geometry, ids)
    assert asked == [length]
    assert ended.rest_reason == "stays here"
    # Rows of a tail as short as the window were not dropped.
    assert length == (common if geometry is not SLIDING or common > 16 else common // CHUNK * CHUNK)
    assert pool.out == 0


def test_the_last_prompt_token_is_left_to_decode() -> None:
    length, ended = served(HeldSource(shelf(FULL), IDS, lambda held: ""), Pool(), FULL, IDS)
    assert (length, ended) == (19, HeldEnded("all held", ""))


class Handoff:
    """A source for the rest that says one thing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, slots: SlotPool) -> None:
        self.calls.append("begin")

    def poll(self) -> SourceDone | None:
        self.calls.append("poll")
        return SourceDone(0.1, 1, 2, "h")

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_a_handoff_brings_the_rest() -> None:
    handoff = Handoff()
    rest: KVSource = handoff
    source = HeldSource(shelf(FULL), [*IDS[:16], *range(20)], lambda held: rest)
    length, ended = served(source, Pool(), FULL, [*IDS[:16], *range(20)])
    assert (length, ended.rest_reason) == (16, None)
    assert source.poll() == SourceDone(0.1, 1, 2, "h")
    source.cancel()
    assert handoff.calls == ["begin", "poll", "cancel"]


def test_a_block_that_has_gone_ends_what_is_held_there() -> None:
    keeper = shelf(FULL)
    fetch, calls = keeper.store.fetch, iter([True, False])
    keeper.store.fetch = lambda head: fetch(head) if next(calls) else None  # type: ignore[method-assign]
    length, ended = served(HeldSource(keeper, IDS, str), Pool(), FULL, IDS)
    assert (length, ended) == (8, HeldEnded("the block at token 8 was lost or damaged", "8"))


def test_an_error_of_ours_ends_what_is_held_and_the_prompt_goes_on() -> None:
    keeper = shelf(FULL)

    def fail(head: object) -> None:
        raise RuntimeError("for the test")

    keeper.store.fetch = fail  # type: ignore[method-assign,assignment]
    length, ended = served(HeldSource(keeper, IDS, lambda held: "here"), Pool(), FULL, IDS)
    assert (length, ended) == (0, HeldEnded("internal: RuntimeError", "here"))


def test_an_error_of_who_chooses_the_way_leaves_the_rest_to_this_node() -> None:
    def fail(held: int) -> Rest:
        raise RuntimeError("for the test")

    length, ended = served(HeldSource(shelf(FULL), IDS, fail), Pool(), FULL, IDS)
    assert (length, ended) == (19, HeldEnded("all held", "internal: RuntimeError"))


def test_a_block_larger_than_a_slot_is_not_used() -> None:
    pool = Pool(100)
    length, ended = served(HeldSource(shelf(FULL), IDS, lambda held: "here"), pool, FULL, IDS)
    assert (length, ended.held_reason) == (0, "a block does not fit a staging slot")
    assert pool.out == 0


@pytest.fixture
def threads() -> Callable[[], bool]:
    """Says whether every thread of a source has ended."""
    return lambda: not [thread for thread in threading.enumerate() if thread.name == "held"]


@pytest.mark.parametrize("polled", range(5))
def test_a_cancel_at_any_moment_gives_every_slot_back(polled: int, threads: Callable[[], bool]) -> None:
    pool = Pool()
    source = HeldSource(shelf(FULL), IDS, lambda held: "here")
    source.begin(pool)
    for _ in range(polled):
        item = news(source)
        if isinstance(item, StagedChunk):
            pool.release(item.slot)
        if isinstance(item, HeldEnded):
            break
    source.cancel()
    source.cancel()
    deadline = time.monotonic() + WAIT_S
    while not threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pool.out == 0
    assert source.poll() is None


def test_a_cancel_before_the_beginning_is_harmless() -> None:
    HeldSource(shelf(FULL), IDS, lambda held: "here").cancel()
