"""Requests that come, end, are cancelled and meet a failing disk, in random order, over one keeper and its store."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from kvpack_support import CHUNK, FULL, SLIDING, WIDE, Shelf, row

from muser_decode.keeper import HeldPart, Keeper, Saving, Slab
from muser_wire.geometry import Geometry
from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids

ROUNDS, STEPS = 40, 60
PLENTY = 1 << 20
FAULTS = (
    "enospc",
    "short write",
    "rename refused",
    "rename lost",
    "rename lost, noticed late",
    "sync refused",
    "read refused",
)
GEOMETRIES = {"full": FULL, "sliding": SLIDING, "wide": WIDE}


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


@dataclass
class Request:
    """A generation that is being saved: `ids` is all that it will have run, `at` how much of it was handed over."""

    ids: list[int]
    at: int
    saving: Saving


def slab(geometry: Geometry, ids: list[int], start: int, stop: int) -> Slab:
    """Rows [start, stop), of sliding layers what a block of this chunk can still need."""
    firsts = tuple(start if window is None else min(stop, max(start, stop - window)) for window in geometry.windows)
    data = b"".join(
        row(ids, layer, plane, position, 8)
        for layer, first in enumerate(firsts)
        for plane in "kv"
        for position in range(first, stop)
    )
    return Slab(start, stop, pack_ids(ids[start:stop]), firsts, np.frombuffer(data, np.uint16))


@dataclass
class World:
    """One store, its keeper, the requests under way. `seen` counts what really happened."""

    chance: random.Random
    shelf: Shelf
    seen: Counter[str]
    keeper: Keeper = field(init=False)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.keeper = Keeper(self.shelf.store)
        self.keeper.start()

    def ids(self) -> list[int]:
        """Token ids of two values, so that many prompts begin alike."""
        return [self.chance.randrange(2) for _ in range(self.chance.randrange(1, 30))]

    def take(self) -> None:
        """Read what is held of a prompt; the shelf compares every byte with what these tokens give."""
        held = self.shelf.take(self.ids())
        self.seen["hit" if held else "miss"] += 1

    def begin(self) -> None:
        """A request comes: it goes on where what is held ends, as the engine does."""
        ids = self.ids()
        match = self.shelf.store.match(pack_ids(ids[:-1]))
        length, last = 0, None
        for part in match.blocks:
            fetched = self.shelf.store.fetch(part.head)
            if fetched is None:
                self.seen["lost"] += 1
                break
            length, last = part.stop, fetched.block
        boundary = length // CHUNK * CHUNK
        if last is not None and last.head.start == boundary < length:
            part = HeldPart(last, length)
            self.requests.append(Request(ids, length, self.keeper.saving(ids, boundary, len(ids), part)))
            self.seen["began inside a block"] += 1
        elif boundary == length:
            self.requests.append(Request(ids, length, self.keeper.saving(ids, boundary, len(ids))))

    def advance(self) -> None:
        """One request hands over some more rows, up to a boundary of the grid at most."""
        if not self.requests:
            return
        request = self.chance.choice(self.requests)
        stop = min(request.at + self.chance.randrange(1, 9), (request.at // CHUNK + 1) * CHUNK, len(request.ids))
        if stop > request.at:
            request.saving.add(slab(self.shelf.geometry, request.ids, request.at, stop))
            request.at = stop
        if stop == len(request.ids):
            self.end(request, "whole")

    def cancel(self) -> None:
        if self.requests:
            request = self.chance.choice(self.requests)
            if self.chance.randrange(3) == 0:
                request.saving.dropped = True
                self.seen["abandoned"] += 1
            self.end(request, "cancelled")

    def end(self, request: Request, how: str) -> None:
        self.requests.remove(request)
        request.saving.close()
        request.saving.end()
        self.seen[how] += 1

    def restart(self) -> None:
        self.keeper.stop()
        self.requests.clear()
        self.gather()
        self.shelf.reopen()
        self.open()
        self.seen["restart"] += 1

    def gather(self) -> None:
        """Add up what the files and the store counted."""
        self.seen.update(self.shelf.files.fired)
        stats = self.shelf.store.stats()
        for name in ("memory_evicted", "disk_evicted", "disk_invalid", "disk_failed_writes"):
            self.seen[name] += int(str(stats.get(name, 0)))

    def damage(self) -> None:
        """Flip a bit of a file, or cut it short."""
        files = sorted(self.shelf.directory.glob("*.safetensors"))
        if not files:
            return
        # The keeper's thread may evict it at this moment: then there is nothing to damage.
        with contextlib.suppress(FileNotFoundError), self.chance.choice(files).open("r+b") as file:
            data = file.read()
            at = self.chance.randrange(len(data) + 1)
            if at < len(data) and self.chance.randrange(2):
                file.seek(at)
                file.write(bytes([data[at] ^ 1 << self.chance.randrange(8)]))
                self.seen["flipped byte"] += 1
            else:
                file.truncate(at)
                self.seen["cut short"] += 1

    def step(self) -> None:
        """Do one thing; the store's bounds hold after it."""
        kind = self.chance.choices(
            ("begin", "advance", "take", "cancel", "restart", "fault", "damage", "settle"), (6, 14, 6, 2, 1, 3, 1, 3)
        )[0]
        if kind == "fault":
            self.shelf.files.fault = self.chance.choice(FAULTS)
        elif kind == "settle":
            assert self.keeper.idle(10)
        else:
            getattr(self, kind)()
        stats = self.shelf.store.stats()
        assert int(str(stats["memory_nbytes"])) <= self.shelf.memory_nbytes
        assert int(str(stats.get("disk_nbytes", 0))) <= self.shelf.disk_nbytes


@pytest.fixture(scope="module")
def seen() -> Iterator[Counter[str]]:
    """What happened in all rounds together: at the end each fault, eviction and kind of ending must be among it."""
    seen: Counter[str] = Counter()
    yield seen
    expected = {
        *FAULTS,
        *("hit", "miss", "whole", "cancelled", "abandoned", "restart", "began inside a block"),
        *("memory_evicted", "disk_evicted", "disk_invalid", "disk_failed_writes", "flipped byte", "cut short", "lost"),
    }
    assert expected <= {name for name, count in seen.items() if count}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_whatever_comes_in_whatever_order_no_wrong_byte_is_served(
    name: str, seen: Counter[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for number in range(ROUNDS):
        chance = random.Random(f"{name} {number}")
        memory, disk = chance.choice((0, 300, 700, PLENTY)), chance.choice((0, 2500, 6000, PLENTY, PLENTY))
        shelf = Shelf(tmp_path_factory.mktemp("store"), GEOMETRIES[name], memory, disk)
        world = World(chance, shelf, seen)
        for _ in range(STEPS):
            world.step()
        # A disk that works again takes everything again.
        shelf.files.fault = ""
        world.restart()
        for _ in range(10):
            world.take()
        world.keeper.stop()
