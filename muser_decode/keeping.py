"""Opens the store of blocks as configured, and the keeper over it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from muser_decode.client import Consumer
from muser_decode.keeper import Keeper
from muser_wire.kvpack.disk import DiskTier, locked, read_key, store_files
from muser_wire.kvpack.naming import Namer, random_key
from muser_wire.kvpack.states import StateFacts, write_state
from muser_wire.kvpack.store import BlockStore
from muser_wire.numerics import Lane

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSizes:
    """What may be kept, in bytes; 0 switches a tier off. `directory` is where the disk's files lie.

    `reuse_decoded` says whether what decode produced may stand in for prefill. Each lane allows it unless told
    otherwise: the reference lane because both give the same bytes, the native lane because the response says so.
    """

    memory_nbytes: int
    disk_nbytes: int
    directory: Path
    reuse_decoded: bool = True


def all_computed(consumer: Consumer, computed: str) -> str:
    """Return what planes depend on beside a node's identities.

    In the reference lane the rules say every byte. In the native one another version of this software or of mlx may
    compute otherwise, or rightly what was wrong before.
    """
    if consumer.identities.lane == Lane.NATIVE.value:
        computed += f" by muser {metadata.version('muser')}, mlx {metadata.version('mlx')}"
    return computed + (" unqualified" if consumer.allow_unqualified else "")


@contextlib.contextmanager
def open_keeper(sizes: CacheSizes, consumer: Consumer, computed: str) -> Iterator[Keeper | None]:
    """Hold the store open, and its keeper running; None when both tiers are off.

    `computed` says what this node's results depend on beside its identities. What was made while a
    producer might have other weights is never served without that permission, and the reverse.

    Raises:
        StoreLocked: another process uses the directory.
        StoreUnusable: the directory cannot be used.
    """
    if not sizes.memory_nbytes and not sizes.disk_nbytes:
        yield None
        return
    with contextlib.ExitStack() as stack:
        identities, geometry = consumer.identities, consumer.geometry
        computed = all_computed(consumer, computed)
        namer, disk = Namer(random_key(), identities, computed), None
        if sizes.disk_nbytes:
            files = store_files(sizes.directory)
            stack.enter_context(locked(files))
            namer = Namer(read_key(files), identities, computed)
            write_state(files, StateFacts(identities, geometry, computed))
            disk = DiskTier(files, namer, geometry, sizes.disk_nbytes)
        keeper = Keeper(BlockStore(namer, geometry, sizes.memory_nbytes, disk, reuse_decoded=sizes.reuse_decoded))
        stats = keeper.store.stats()
        _log.info("cache_opened blocks=%s disk_nbytes=%s", stats["blocks"], stats.get("disk_nbytes", 0))
        keeper.start()
        stack.callback(keeper.stop)
        yield keeper
