"""How fast blocks go to disk and come back, beside plain files of the same sizes, written and synced alike.

`python -m bench.kvpack --help` lists the options. Rounds interleave. Before each read the system is asked to forget
the files, so that both read the disk; where it cannot be asked, both read memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.driver import BenchError, machine, table, write_result
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.kvpack.block import Block, BlockHead, make_block, pack_ids, payload_nbytes
from muser_wire.kvpack.disk import DiskTier
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.naming import Namer, random_key
from muser_wire.kvpack.store import BlockStore

SMOLLM2 = Geometry((None,) * 30, kv_heads=3, head_dim=64, element=ElementType.F16)
CHUNK_TOKENS = 2048
GOAL = 0.5
"""Least share of the plain files' rate."""

KEY = random_key()
NO_DIGEST = Digest(bytes(32))
IDENTITIES = Identities(NO_DIGEST, NO_DIGEST, "", "", NO_DIGEST, CHUNK_TOKENS, NO_DIGEST)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="bench.kvpack", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="written and read in a round")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's temporary directory")
    parser.add_argument("--out", type=Path, help="write the samples here, as JSON")
    args = parser.parse_args(argv)
    host = machine()
    blocks = chain(args.megabytes * 1_000_000)
    samples: dict[str, list[float]] = {name: [] for name in ("plain write", "plain read", "block write", "block read")}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            measure(Path(directory), blocks, samples)
    nbytes = sum(block.nbytes for block in blocks)
    medians = {name: nbytes / statistics.median(times) / 1e9 for name, times in samples.items()}
    ratios = {
        kind: statistics.median(
            plain / ours for plain, ours in zip(samples[f"plain {kind}"], samples[f"block {kind}"], strict=True)
        )
        for kind in ("write", "read")
    }
    print(table(["", "GB/s"], [[name, f"{rate:.2f}"] for name, rate in medians.items()]))
    for kind, ratio in ratios.items():
        print(f"{kind}: {ratio:.2f} of plain files; the goal is {GOAL}")
    if args.out is not None:
        write_result(args.out, host, unit="seconds", nbytes=nbytes, samples=samples, ratios=ratios)
    return 1 if min(ratios.values()) < GOAL else 0


def chain(nbytes: int) -> list[Block]:
    """Return a chain of blocks of about so many bytes together."""
    namer = Namer(KEY, IDENTITIES)
    size = payload_nbytes(SMOLLM2, 0, CHUNK_TOKENS)
    count = max(1, nbytes // size)
    payload = os.urandom(size)
    ids = pack_ids(range(count * CHUNK_TOKENS))
    return [
        make_block(SMOLLM2, BlockHead(name, parent, start, own), payload)
        for name, parent, start, own in namer.chain(ids)
    ]


def measure(directory: Path, blocks: list[Block], samples: dict[str, list[float]]) -> None:
    """Write and read everything once as plain files and once as blocks."""
    plain, stored = PlainFiles(directory / "plain"), StoredBlocks(directory / "blocks")
    steps: list[tuple[str, Callable[[list[Block]], None]]] = [
        ("plain write", plain.write),
        ("block write", stored.write),
        ("plain read", plain.read),
        ("block read", stored.read),
    ]
    for name, step in steps:
        if name.endswith("read"):
            forget(directory)
        started = time.perf_counter()
        step(blocks)
        samples[name].append(time.perf_counter() - started)


class PlainFiles:
    """The blocks' bytes in files of their own."""

    def __init__(self, directory: Path) -> None:
        self._files = Files(directory)
        self._files.prepare()

    def write(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._files.write(block.head.name.hex(), [block.payload])

    def read(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._files.read(block.head.name.hex())


class StoredBlocks:
    """A store on disk alone."""

    def __init__(self, directory: Path) -> None:
        files = Files(directory)
        files.prepare()
        namer = Namer(KEY, IDENTITIES)
        self._store = BlockStore(namer, SMOLLM2, 0, DiskTier(files, namer, SMOLLM2, 1 << 40))

    def write(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._store.put(block)

    def read(self, blocks: list[Block]) -> None:
        for block in blocks:
            if self._store.fetch(block.head) is None:
                raise BenchError("a block did not come back")


def forget(directory: Path) -> None:
    """Ask the system to drop what it holds of the files in memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
