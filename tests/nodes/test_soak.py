"""Many handoffs of mixed sizes with random faults and cancels: answers right, nothing left behind.

`make soak` runs the long form: MUSER_SOAK_ROUNDS says how many handoffs.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import muser_decode.engine.cache
import muser_prefill.engine.cache
from muser_decode.engine.request import Event, Finished, FinishReason, GenerationRequest, Route
from muser_decode.engine.source import SlotPool, SourceFailed, StagingSlot
from muser_wire.errors import TransportError

ROUNDS = int(os.environ.get("MUSER_SOAK_ROUNDS", "60"))
CANCEL_ROUNDS = 200
SETTLE_S = 20.0
SLOTS = 2
"""Staging slots of an engine."""

ROW_NBYTES = 6 * 2 * 2 * 16 * 4
"""A token's keys and values in this node's cache: 6 layers, 2 heads of 16, in float32."""

LONG_CACHE_NBYTES = 1024 * ROW_NBYTES
SHORT_CACHE_NBYTES = 512 * ROW_NBYTES
"""Caches of prompts up to 900 and 400 tokens: room grows in steps of 512."""

GROWTH_NBYTES = 64 << 20
"""What allocators of a process that ran thousands of tests may keep: a fifth of a long cache for each cancel."""


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_bound_nbytes(rounds: int, cache_nbytes: int) -> int:
    """Half of what a leak of one cache a round would keep; what is counted directly catches smaller ones."""
    return min(GROWTH_NBYTES, rounds * cache_nbytes // 2)


class PoolProbe:
    """A source that brings nothing and keeps the engine's pool of staging slots."""

    def begin(self, slots: SlotPool) -> None:
        self.slots = slots

    def poll(self) -> SourceFailed:
        return SourceFailed("a probe", 0.0, 0, 0, "")

    def cancel(self) -> None:
        pass


def pool_of(pair: Any) -> SlotPool:
    """Return the engine's pool, which lives on the engine's thread."""
    probe, ended = PoolProbe(), threading.Event()
    request = GenerationRequest("probe", (5, 6, 7), 1)
    pair.engine.submit(request, lambda event: ended.set() if isinstance(event, Finished) else None, probe)
    assert ended.wait(SETTLE_S)
    return probe.slots


def free_slots(pool: SlotPool) -> list[int]:
    """The slots that nobody holds, each once; they are free again afterwards."""
    taken: list[StagingSlot] = []
    while (slot := pool.acquire(0.0)) is not None:
        taken.append(slot)
    for slot in taken:
        pool.release(slot)
    return sorted(slot.index for slot in taken)


def living_caches() -> Counter[type]:
    """Caches of both nodes that something still refers to."""
    gc.collect()
    kinds = (muser_decode.engine.cache.KVCache, muser_prefill.engine.cache.KVCache)
    return Counter(kind for kind in map(type, gc.get_objects()) if kind in kinds)


def settled(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SETTLE_S
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def working_threads() -> list[str]:
    """Threads that a handoff starts and must end. grpc's own, other tests' servers among them, come and go."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ingest"))


@dataclass(frozen=True)
class Held:
    """What requests hold while they run. Taken when none does, it must come back."""

    threads: list[str]
    caches: Counter[type]
    slots: list[int]
    promised: int
    load: int

    @classmethod
    def now(cls, pair: Any, pool: SlotPool) -> Held:
        scheduler = pair.producer.scheduler
        return cls(working_threads(), living_caches(), free_slots(pool), scheduler.load, pair.engine.load)


def check_all_came_back(pair: Any, pool: SlotPool, before: Held) -> None:
    settled(lambda: Held.now(pair, pool) == before)
    assert Held.now(pair, pool) == before
    assert before.slots == list(range(SLOTS))
    assert before.threads == []


def quiet(pair: Any, pool: SlotPool) -> Held:
    """What is held while nothing runs; other tests of this process may hold caches of their own."""
    held = Held.now(pair, pool)
    while True:
        time.sleep(0.2)
        held, last = Held.now(pair, pool), held
        if held == last:
            return held


def fault(kind: str, place: int) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
    def altered(frames: Iterator[bytes]) -> Iterator[bytes]:
        for index, frame in enumerate(frames):
            if index != place:
                yield frame
            elif kind == "flip":
                yield frame[:-1] + bytes([frame[-1] ^ 1])
            elif kind == "repeat":
                yield frame
                yield frame
            elif kind == "die":
                raise TransportError("unavailable: Socket closed")
            elif kind == "end":
                return

    return altered


@pytest.mark.timeout(1800)
def test_soak(pair: Any) -> None:
    rng = random.Random(7)
    prompts = [tuple(5 + rng.randrange(200) for _ in range(size)) for size in (33, 64, 65, 129, 200, 400)]
    pool = pool_of(pair)
    before = quiet(pair, pool)
    expected = {prompt: pair.ask(prompt, tokens=4).tokens for prompt in prompts}
    resident = resident_nbytes()
    routes: set[Route] = set()
    for _ in range(ROUNDS):
        prompt = rng.choice(prompts)
        kind = rng.choice(["none", "flip", "repeat", "drop", "die", "end"])
        answer = pair.ask(prompt, tokens=4, fault=None if kind == "none" else fault(kind, rng.randrange(6)))
        assert answer.tokens == expected[prompt], kind
        assert isinstance(answer.last, Finished)
        routes.add(answer.report.route)
    assert routes == {Route.REMOTE, Route.SALVAGED, Route.LOCAL}
    assert pair.ask(prompts[-1], tokens=4).report.route is Route.REMOTE
    check_all_came_back(pair, pool, before)
    assert resident_nbytes() - resident < growth_bound_nbytes(ROUNDS, SHORT_CACHE_NBYTES)


@pytest.mark.timeout(600)
def test_cancels_leave_nothing_behind(pair: Any) -> None:
    prompt = tuple(5 + index % 200 for index in range(900))
    pool = pool_of(pair)
    before = quiet(pair, pool)
    expected = pair.ask(prompt, tokens=2).tokens
    resident = resident_nbytes()
    rng = random.Random(11)
    for _ in range(CANCEL_ROUNDS):
        events: queue.Queue[Event] = queue.Queue()
        generation = pair.node.submit(GenerationRequest("leaving", prompt, 1000), events.put)
        time.sleep(rng.random() * 0.01)
        generation.cancel()
        last = events.get(timeout=SETTLE_S)
        while not isinstance(last, Finished):
            last = events.get(timeout=SETTLE_S)
        assert last.reason is FinishReason.CANCELLED
    check_all_came_back(pair, pool, before)
    answer = pair.ask(prompt, tokens=2)
    assert (answer.tokens, answer.report.route) == (expected, Route.REMOTE)
    assert resident_nbytes() - resident < growth_bound_nbytes(CANCEL_ROUNDS, LONG_CACHE_NBYTES)
