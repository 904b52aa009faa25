"""What can go wrong with blocks at rest. A damaged block is a miss and stays inside this package."""

from __future__ import annotations

from muser_wire.errors import WireError


class BlockInvalid(WireError):
    """A stored block is cut short, altered or not what its name says; nothing of it was used."""

    code = "block_invalid"


class StoreLocked(WireError):
    """Another process uses this cache directory. The message names it."""

    code = "store_locked"


class StoreUnusable(WireError):
    """The cache directory cannot be made, read or written. The message names it and says why."""

    code = "store_unusable"
