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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muser_decode.engine.request import Event, Finished, FinishReason, GenerationRequest, Route
from muser_wire.errors import TransportError
from muser_wire.transport.grpc import CONTROL_THREADS, DATA_THREADS

ROUNDS = int(os.environ.get("MUSER_SOAK_ROUNDS", "60"))
CANCEL_ROUNDS = 200
SETTLE_S = 20.0
GROWTH_NBYTES = 64 << 20
"""What allocators may keep after the rounds; a leak of one staging slot or cache a round is far beyond it."""


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SETTLE_S
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def working_threads() -> list[str]:
    """Threads that a handoff starts and must end; grpc's pools keep theirs, up to their named sizes."""
    pools = CONTROL_THREADS + DATA_THREADS
    names = [thread.name for thread in threading.enumerate() if not thread.name.startswith("ThreadPoolExecutor")]
    assert threading.active_count() - len(names) <= pools
    return sorted(names)


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
    expected = {prompt: pair.ask(prompt, tokens=4).tokens for prompt in prompts}
    threads = working_threads()
    before = resident_nbytes()
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
    assert settled(lambda: working_threads() == threads)
    assert not pair.producer.scheduler._pending
    gc.collect()
    assert resident_nbytes() - before < GROWTH_NBYTES


@pytest.mark.timeout(600)
def test_cancels_leave_nothing_behind(pair: Any) -> None:
    prompt = tuple(5 + index % 200 for index in range(900))
    expected = pair.ask(prompt, tokens=2).tokens
    threads = working_threads()
    before = resident_nbytes()
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
    assert settled(lambda: not pair.producer.scheduler._pending)
    assert settled(lambda: working_threads() == threads)
    assert settled(lambda: pair.engine.load == 0)
    answer = pair.ask(prompt, tokens=2)
    assert (answer.tokens, answer.report.route) == (expected, Route.REMOTE)
    gc.collect()
    assert resident_nbytes() - before < GROWTH_NBYTES
