"""A tiny geometry, planes that say which tokens they came from, and a file system that fails when told to."""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.kvpack.block import Block, BlockHead, make_block, pack_ids
from muser_wire.kvpack.disk import DiskTier
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.states import StateFacts, write_state
from muser_wire.kvpack.store import BlockStore

CHUNK = 8
KEY = bytes(range(32))
FULL = Geometry(windows=(None, None), kv_heads=1, head_dim=4, element=ElementType.F16)
SLIDING = Geometry(windows=(4, None), kv_heads=1, head_dim=4, element=ElementType.F16)
"""A window shorter than a chunk: such blocks can only be resumed at their ends."""

WIDE = Geometry(windows=(12, None), kv_heads=1, head_dim=4, element=ElementType.BF16)
"""A window longer than a chunk: a block's own rows are not all that its end needs."""


def identities(**changes: object) -> Identities:
    values: dict[str, object] = {
        "spec_digest": Digest(b"s" * 32),
        "tokenizer_digest": Digest(b"t" * 32),
        "kv_layout": "kv1/f16/k,v/token,head,dim",
        "lane": "native",
        "numerics_digest": Digest(b"n" * 32),
        "chunk_tokens": CHUNK,
        "weights_digest": Digest(b"w" * 32),
    }
    return Identities(**{**values, **changes})  # type: ignore[arg-type]


def row(ids: Sequence[int], layer: int, plane: str, position: int, nbytes: int) -> bytes:
    """What this plane holds at `position`, a function of every token up to it: 8 bytes of a digest, repeated."""
    text = f"{layer} {plane} {list(ids[: position + 1])}".encode()
    return (hashlib.sha256(text).digest() * 8)[:nbytes]


def expected_payload(geometry: Geometry, ids: Sequence[int], start: int, stop: int) -> bytes:
    """A block's bytes, written out once more: layer after layer, keys before values, the window of sliding ones."""
    out = b""
    for layer, window in enumerate(geometry.windows):
        first = start if window is None else max(start, stop - window)
        for plane in ("k", "v"):
            nbytes = geometry.kv_heads * geometry.head_dim * 2
            out += b"".join(row(ids, layer, plane, position, nbytes) for position in range(first, stop))
    return out


def blocks_of(namer: Namer, geometry: Geometry, ids: Sequence[int], *, decoded_from: int | None = None) -> list[Block]:
    """The chain of blocks of a request that ended with these tokens."""
    chain = []
    for name, parent, start, own in namer.chain(pack_ids(ids)):
        stop = start + len(own) // 4
        decoded = decoded_from is not None and stop > decoded_from
        head = BlockHead(name, parent, start, own, max(start, decoded_from or 0) if decoded else None)
        chain.append(make_block(geometry, head, expected_payload(geometry, ids, start, stop)))
    return chain


class FaultyFiles(Files):
    """Does once, at the next operation of that kind, what `fault` says; `fired` counts what it did."""

    fault = ""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fired: Counter[str] = Counter()

    def _due(self, fault: str) -> bool:
        if self.fault != fault:
            return False
        self.fault = ""
        self.fired[fault] += 1
        return True

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        if self._due("enospc"):
            super().write(name, [data[: len(data) // 2]])
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._due("short write"):
            data = data[: len(data) * 2 // 3]
        super().write(name, [data])

    def rename(self, name: str, to: str) -> None:
        if self._due("rename refused"):
            raise OSError(errno.EIO, "Input/output error")
        if self._due("rename lost"):
            self.delete(name)
            return
        super().rename(name, to)

    def sync(self) -> None:
        if self._due("sync refused"):
            raise OSError(errno.EIO, "Input/output error")
        super().sync()

    def touch(self, name: str, used_ns: int) -> None:
        if self._due("rename lost, noticed late"):
            self.delete(name)
            return
        super().touch(name, used_ns)

    def read(self, name: str) -> bytes:
        if self._due("read refused"):
            raise OSError(errno.EIO, "Input/output error")
        return super().read(name)


class Shelf:
    """A store over a directory, which can be closed and opened again."""

    def __init__(self, directory: Path, geometry: Geometry, memory_nbytes: int, disk_nbytes: int) -> None:
        self.directory, self.geometry = directory, geometry
        self.memory_nbytes, self.disk_nbytes = memory_nbytes, disk_nbytes
        self.identities = identities()
        self.reopen()

    def reopen(self) -> None:
        self.files = FaultyFiles(self.directory)
        self.files.prepare()
        (self.directory / "key").write_bytes(KEY)
        self.namer = Namer(KEY, self.identities)
        self.disk = DiskTier(self.files, self.namer, self.geometry, self.disk_nbytes) if self.disk_nbytes else None
        self.store = BlockStore(self.namer, self.geometry, self.memory_nbytes, self.disk)

    def describe(self) -> StateFacts:
        """Describe this store's state in its directory, as a node does."""
        facts = StateFacts(self.identities, self.geometry, "")
        write_state(self.files, facts)
        return facts

    def keep(self, ids: Sequence[int], *, decoded_from: int | None = None) -> list[bool]:
        """Put every block of a request."""
        return [self.store.put(block) for block in blocks_of(self.namer, self.geometry, ids, decoded_from=decoded_from)]

    def take(self, ids: Sequence[int]) -> int:
        """Fetch the held prefix of a prompt and check every byte of it; return how many tokens came."""
        held = 0
        for part in self.store.match(pack_ids(ids)).blocks:
            assert part.head.start == held
            fetched = self.store.fetch(part.head)
            if fetched is None:
                break
            block = fetched.block
            chain = [*ids[: part.head.start], *part.head.token_ids.tolist()]
            assert chain[: part.stop] == list(ids[: part.stop])
            assert bytes(block.payload) == expected_payload(self.geometry, chain, part.head.start, part.head.stop)
            held = part.stop
        return held
