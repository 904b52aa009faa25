from __future__ import annotations

import threading
import time

import pytest
from kvpack_support import SLIDING, expected_payload, row

from muser_decode.engine.source import Piece, SlotPool, StagedChunk, StagingSlot, copied_rows
from muser_wire.kvpack.block import pack_ids

NAP_S = 0.05


def new_pool(slots: int = 2, wake=lambda: None) -> SlotPool:
    return SlotPool([StagingSlot(index, memoryview(bytearray(8))) for index in range(slots)], wake)


def test_each_slot_is_lent_once() -> None:
    pool = new_pool()
    lent = [pool.acquire(0.0), pool.acquire(0.0)]
    assert {slot.index for slot in lent} == {0, 1}
    assert pool.acquire(0.0) is None
    pool.release(lent[1])
    assert pool.acquire(0.0) is lent[1]


def test_acquire_waits_for_a_release() -> None:
    pool = new_pool(1)
    slot = pool.acquire(0.0)
    timer = threading.Timer(NAP_S, pool.release, [slot])
    timer.start()
    assert pool.acquire(10.0) is slot
    timer.join()


def test_acquire_gives_up_after_its_time() -> None:
    pool = new_pool(0)
    began = time.monotonic()
    assert pool.acquire(NAP_S) is None
    assert time.monotonic() - began >= NAP_S


@pytest.mark.parametrize("waiters", [1, 3])
def test_closing_ends_every_wait(waiters: int) -> None:
    pool = new_pool(0)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(pool.acquire(60.0))) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    time.sleep(NAP_S)
    pool.close()
    for thread in threads:
        thread.join(10.0)
    assert results == [None] * waiters


def test_a_closed_pool_lends_nothing() -> None:
    pool = new_pool(1)
    pool.close()
    assert pool.acquire(0.0) is None


def test_wake_reaches_the_engine() -> None:
    woken = threading.Event()
    new_pool(wake=woken.set).wake()
    assert woken.is_set()


def test_the_rows_of_a_chunk_are_copied_as_they_are_saved() -> None:
    """Segments come by layer, cut along tokens; of a layer with a window, what lies in it before the chunk's end."""
    ids, pieces, data = list(range(50, 66)), [], b""
    for layer, start, stop in ((0, 12, 14), (0, 14, 16), (1, 8, 11), (1, 11, 16)):
        planes = [b"".join(row(ids, layer, plane, at, 8) for at in range(start, stop)) for plane in "kv"]
        pieces.append(Piece(layer, start, stop, len(data), len(data) + len(planes[0])))
        data += b"".join(planes)
    chunk = StagedChunk(8, 16, StagingSlot(0, memoryview(bytearray(data))), tuple(pieces))
    slab = copied_rows(chunk, pack_ids(ids[8:16]), SLIDING)
    chunk.slot.memory[:] = bytes(len(data))
    assert (slab.start, slab.stop, slab.ids, slab.firsts) == (8, 16, pack_ids(ids[8:16]), (12, 8))
    assert slab.words.tobytes() == expected_payload(SLIDING, ids, 8, 16)
