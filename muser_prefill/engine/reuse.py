"""What the producer keeps of prompts that it computed: blocks in host memory, so that a prompt with the same
beginning costs only its rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from muser_prefill.engine.cache import KVCache
from muser_prefill.numerics import TORCH_ELEMENTS
from muser_wire.geometry import Geometry
from muser_wire.kvpack.block import Block, BlockHead, block_layout, first_held, make_block, pack_ids
from muser_wire.kvpack.index import MIN_HELD_TOKENS
from muser_wire.kvpack.store import BlockStore


class ComputedPrompts:
    """Loads caches from, and saves them to, a store in memory. Only the compute thread uses it."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._geometry = store.geometry

    def load(self, token_ids: Sequence[int], cache: KVCache) -> int:
        """Fill an empty cache with the longest held prefix; return how many tokens that is."""
        for part in self._store.match(pack_ids(token_ids)).blocks:
            fetched = self._store.fetch(part.head)
            if fetched is None:
                break
            _install(cache, self._geometry, fetched.block, part.stop)
        return cache.length

    def save(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Keep what a cache holds of a prompt, as far as the store has it not already."""
        if cache.length < MIN_HELD_TOKENS:
            return
        ids = pack_ids(token_ids[: cache.length])
        held_tokens = self._store.explain(ids).tokens
        for name, parent, start, own in self._store.namer.chain(ids):
            head = BlockHead(name, parent, start, own)
            if head.stop > held_tokens:
                self._store.put(make_block(self._geometry, head, _copy(cache, self._geometry, start, head.stop)))


def _install(cache: KVCache, geometry: Geometry, block: Block, stop: int) -> None:
    """Write a block's planes for tokens up to `stop` into a cache that ends where the block begins."""
    start = block.head.start
    words = torch.from_numpy(np.frombuffer(block.payload, np.int16).copy())
    cache.begin(stop - start)
    for pair in block_layout(geometry, start, block.head.stop):
        shape = (2, pair.stop - pair.start, geometry.kv_heads, geometry.head_dim)
        planes = words[pair.offset // 2 : (pair.offset + pair.nbytes) // 2].view(TORCH_ELEMENTS[geometry.element])
        first = first_held(geometry.windows[pair.layer], start, stop)
        keys, values = planes.view(shape)[:, first - pair.start : stop - pair.start]
        cache.write(pair.layer, first, keys, values)
    cache.commit(stop)


def _copy(cache: KVCache, geometry: Geometry, start: int, stop: int) -> memoryview:
    """Return the payload of a block [start, stop), in host memory."""
    planes = [
        plane.reshape(-1).view(torch.uint8)
        for pair in block_layout(geometry, start, stop)
        for plane in cache.planes(pair.layer, pair.start, pair.stop)
    ]
    return memoryview(torch.cat(planes).cpu().numpy())  # type: ignore[arg-type]  # numpy's stub hides the buffer
