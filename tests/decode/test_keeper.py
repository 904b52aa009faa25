from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpack_support import CHUNK, FULL, KEY, SLIDING, WIDE, Shelf, blocks_of, expected_payload, identities, row

from muser_decode.keeper import Assembly, HeldPart, Keeper, Slab
from muser_wire.geometry import Geometry
from muser_wire.kvpack import index
from muser_wire.kvpack.block import Block, pack_ids
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore, Kept

IDS = list(range(300, 322))
PLENTY = 1 << 20


def slab(geometry: Geometry, ids: list[int], start: int, stop: int, reach: int | None = None) -> Slab:
    """Rows of [start, stop), of sliding layers those within the window before `reach`."""
    firsts = tuple(
        start if window is None else min(stop, max(start, (reach or stop) - window)) for window in geometry.windows
    )
    data = b"".join(
        row(ids, layer, plane, position, 8)
        for layer, first in enumerate(firsts)
        for plane in "kv"
        for position in range(first, stop)
    )
    return Slab(start, stop, pack_ids(ids[start:stop]), firsts, np.frombuffer(data, np.uint16))


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(Namer(KEY, identities()), FULL, PLENTY)


@pytest.fixture
def keeper(store: BlockStore) -> Iterator[Keeper]:
    keeper = Keeper(store)
    keeper.start()
    yield keeper
    keeper.stop()


def held(store: BlockStore, ids: list[int]) -> list[bytes]:
    fetched = [store.fetch(part.head) for part in store.match(pack_ids(ids)).blocks]
    return [bytes(item.block.payload) for item in fetched if item]


def drained(keeper: Keeper) -> bool:
    return keeper.idle(10) and keeper._pending_nbytes == 0


@pytest.mark.parametrize("geometry", [FULL, SLIDING])
@pytest.mark.parametrize("cuts", [[8, 16, 22], [3, 8, 9, 15, 16, 20, 22], list(range(1, 23))])
def test_slabs_of_any_size_give_the_blocks_of_the_request(geometry: Geometry, cuts: list[int]) -> None:
    assembly = Assembly(Namer(KEY, identities()), geometry, b"", 12)
    blocks: list[Block] = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        # A recorder knows only how far the cache reached when it copied.
        done = assembly.add(slab(geometry, IDS, start, stop))
        blocks += [done] if done else []
    tail = assembly.end()
    assert tail is not None
    blocks.append(tail)
    assert [bytes(block.payload) for block in blocks] == [
        expected_payload(geometry, IDS, start, min(start + CHUNK, 22)) for start in (0, 8, 16)
    ]
    assert [block.head.name for block in blocks] == [name for name, *_ in Namer(KEY, identities()).chain(pack_ids(IDS))]
    assert [block.head.decoded_from for block in blocks] == [None, 12, 16]
    assert assembly.end() is None
    assert assembly.nbytes == 0


@pytest.mark.parametrize(
    ("geometry", "end", "stop"),
    [
        (FULL, 13, 13),
        (FULL, 16, 11),
        (FULL, 13, 9),
        (WIDE, 16, 11),
        (WIDE, 15, 15),
        (SLIDING, 15, 15),
        (SLIDING, 11, 10),
    ],
)
def test_a_block_may_begin_with_part_of_one_that_is_held(geometry: Geometry, end: int, stop: int) -> None:
    namer = Namer(KEY, identities())
    held = blocks_of(namer, geometry, IDS[:end])[1]
    ids = [*IDS[:stop], *range(40)]
    assembly = Assembly(namer, geometry, pack_ids(ids[:8]), 40, HeldPart(held, stop))
    if stop + 1 < 16:
        assert assembly.add(slab(geometry, ids, stop, stop + 1)) is None
    block = assembly.add(slab(geometry, ids, min(stop + 1, 15), 16))
    assert block is not None
    assert bytes(block.payload) == expected_payload(geometry, ids, 8, 16)
    assert block.head.name == list(namer.chain(pack_ids(ids[:16])))[1][0]
    assert assembly.nbytes == 0


def test_a_held_part_alone_makes_no_block() -> None:
    namer = Namer(KEY, identities())
    held = blocks_of(namer, FULL, IDS[:13])[1]
    assert Assembly(namer, FULL, pack_ids(IDS[:8]), 40, HeldPart(held, 13)).end() is None


def test_rows_that_do_not_come_next_or_lack_a_window_make_no_block() -> None:
    assembly = Assembly(Namer(KEY, identities()), SLIDING, b"", 0)
    with pytest.raises(BlockInvalid, match="rows of token 2 came when those of 0 were due"):
        assembly.add(slab(SLIDING, IDS, 2, 4))
    assembly.add(slab(SLIDING, IDS, 0, 6))
    with pytest.raises(BlockInvalid, match="layer 0 lacks rows of token 6"):
        assembly.add(slab(SLIDING, IDS, 6, 8, reach=11))


def test_a_request_goes_on_after_what_was_held(keeper: Keeper, store: BlockStore) -> None:
    first = keeper.saving(IDS, 0, 22)
    first.add(slab(FULL, IDS, 0, 8))
    first.add(slab(FULL, IDS, 8, 12))
    first.close()
    first.end()
    assert drained(keeper)
    second = keeper.saving(IDS, 8, 22)
    second.add(slab(FULL, IDS, 8, 16))
    second.add(slab(FULL, IDS, 16, 22))
    second.close()
    second.end()
    assert drained(keeper)
    assert held(store, IDS) == [expected_payload(FULL, IDS, start, min(start + 8, 22)) for start in (0, 8, 16)]


def test_a_keeper_that_is_behind_drops_a_request_and_waits_for_nobody(store: BlockStore) -> None:
    keeper = Keeper(store, max_pending_nbytes=300)
    saving = keeper.saving(IDS, 0, 22)
    saving.add(slab(FULL, IDS, 0, 8))
    assert not saving.dropped
    saving.add(slab(FULL, IDS, 8, 12))
    assert saving.dropped
    saving.close()
    saving.end()
    keeper.start()
    assert drained(keeper)
    assert keeper.dropped == 1
    assert held(store, IDS) == [], "all of it was still in the queue"
    later = keeper.saving(IDS, 0, 22)
    later.add(slab(FULL, IDS, 0, 8))
    later.end()
    assert drained(keeper)
    assert len(held(store, IDS)) == 1
    keeper.stop()


def test_a_request_dropped_half_way_frees_what_it_had(keeper: Keeper, store: BlockStore) -> None:
    saving = keeper.saving(IDS, 0, 22)
    saving.add(slab(FULL, IDS, 0, 8))
    saving.add(slab(FULL, IDS, 8, 12))
    assert keeper.idle(10)
    assert keeper._pending_nbytes == 4 * 32
    saving.dropped = True
    saving.end()
    assert drained(keeper)
    assert len(held(store, IDS)) == 1


def test_a_block_whose_parent_has_gone_drops_the_rest(keeper: Keeper, store: BlockStore) -> None:
    saving = keeper.saving(IDS, 8, 22)
    saving.add(slab(FULL, IDS, 8, 16))
    saving.end()
    assert drained(keeper)
    assert (keeper.dropped, store.stats()["blocks"]) == (1, 0)


def test_the_next_turn_waits_for_the_end_of_the_one_before_but_not_for_strangers(keeper: Keeper) -> None:
    saving = keeper.saving(IDS, 0, 22)
    saving.close()
    began = time.monotonic()
    keeper.settle([1, 2, 3], timeout_s=10)
    keeper.settle([*IDS[:20], 1, 2, 3], timeout_s=10)
    assert time.monotonic() - began < 5
    keeper.settle(IDS, timeout_s=0.05)
    timer = threading.Timer(0.05, saving.end)
    timer.start()
    keeper.settle([*IDS, 1, 2], timeout_s=30)
    assert not keeper._ending
    timer.join()


def test_the_keeper_outlives_an_error(keeper: Keeper, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kept: Kept) -> bool:
        raise RuntimeError("for the test")

    monkeypatch.setattr(store, "persist", fail)
    for _ in range(2):
        saving = keeper.saving(IDS, 0, 22)
        saving.add(slab(FULL, IDS, 0, 8))
        saving.end()
        assert drained(keeper)
    assert keeper._thread.is_alive()


def test_a_disk_that_is_behind_costs_the_blocks_that_would_wait_and_no_memory(tmp_path: Path) -> None:
    """Rows become blocks before any block is saved; of those, so many bytes wait for the disk and no more."""
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    keeper = Keeper(shelf.store)
    prompts = [[number, *IDS[:7]] for number in range(6)]
    for ids in prompts:
        saving = keeper.saving(ids, 0, 8)
        saving.add(slab(FULL, ids, 0, 8))
        saving.close()
        saving.end()
    # A block has 256 bytes.
    keeper._max_pending_nbytes = 600
    keeper.start()
    assert drained(keeper)
    assert keeper.undersaved == 4
    assert keeper._unsaved_nbytes == 0
    keeper.stop()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert [bool(held(shelf.store, ids)) for ids in prompts] == [True] * 2 + [False] * 4
