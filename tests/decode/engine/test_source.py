from __future__ import annotations

import threading
import time

import pytest

from muser_decode.engine.source import SlotPool, StagingSlot

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
