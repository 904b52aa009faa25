"""Recording: copies a generation's rows to host memory for the keeper, in slabs so small that no token waits long.

A chunk's rows are copied once the next chunk begins; those after the last boundary of the prompt, and the
generated ones, between tokens. After the end of a generation the rest follows, one slab a turn of the loop.
"""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np

from muser_decode.engine.contract import Cache
from muser_decode.errors import CacheError
from muser_decode.keeper import HeldPart, Keeper, Saving, Slab
from muser_wire.geometry import Geometry
from muser_wire.kvpack.block import Block, pack_ids

SLAB_NBYTES = 1 << 20
"""Rows of at most so many bytes are copied between two tokens: about a millisecond."""

LARGE_SLAB_NBYTES = 16 << 20
"""The same between two chunks, which take seconds, while nobody gets tokens."""

SHARED_SLAB_NBYTES = 4 << 20
"""The same between two chunks, once a turn, while others get tokens."""

MIN_SLAB_TOKENS = 32
"""Fewer rows wait for more: each copy costs a launch for each layer, and a wait for the step under way."""

log = logging.getLogger(__name__)


class Recorder:
    """Copies the rows of one cache, in order, from token `start` on. `ids` grows with the generation."""

    def __init__(
        self, cache: Cache, ids: list[int], start: int, saving: Saving, *, geometry: Geometry, chunk_tokens: int
    ) -> None:
        self._cache, self._ids, self._at, self._saving = cache, ids, start, saving
        self._geometry, self._chunk_tokens = geometry, chunk_tokens
        token_nbytes = geometry.layer_token_nbytes * len(geometry.windows)
        self._slab_tokens = max(MIN_SLAB_TOKENS, SLAB_NBYTES // token_nbytes)
        self._shared_slab_tokens = max(MIN_SLAB_TOKENS, SHARED_SLAB_NBYTES // token_nbytes)
        self._large_slab_tokens = max(MIN_SLAB_TOKENS, LARGE_SLAB_NBYTES // token_nbytes)

    def catch_up(self, *, shared: bool = False) -> bool:
        """Copy everything that is in the cache: before a chunk whose rows may push these out.

        `shared` says that others get tokens meanwhile: then one slab of it, and False as long as there are more.
        """
        if shared:
            return not self._copy(self._cache.length, self._shared_slab_tokens) or self._at == self._cache.length
        while self._copy(self._cache.length, self._large_slab_tokens):
            pass
        return True

    def take(self, slab: Slab) -> None:
        """Hand over rows that whoever brought them has copied already, if they are the next ones."""
        if slab.start == self._at and not self._saving.dropped:
            self._saving.add(slab)
            self._at = slab.stop

    def step(self) -> None:
        """Copy a slab, if there are enough rows of tokens whose step is complete."""
        known = min(self._cache.length, len(self._ids) - 1)
        # A slab that ends on a boundary completes a block, however few rows it has.
        if known - self._at >= MIN_SLAB_TOKENS or self._at // self._chunk_tokens < known // self._chunk_tokens:
            self._copy(known, self._slab_tokens)

    def close(self) -> None:
        """Say that the generation has ended; `finish` follows until it returns False."""
        self._saving.close()

    def finish(self) -> bool:
        """Copy one of the last slabs; return False when there are no more."""
        if self._copy(min(self._cache.length, len(self._ids)), self._slab_tokens):
            return True
        self._saving.end()
        return False

    def abandon(self) -> None:
        """Save nothing more."""
        self._saving.dropped = True

    def _copy(self, known: int, tokens: int) -> bool:
        """Copy at most `tokens` rows below `known` and a boundary of the grid; return whether there were any."""
        chunk_stop = (self._at // self._chunk_tokens + 1) * self._chunk_tokens
        stop = min(known, self._at + tokens, chunk_stop)
        if stop <= self._at or self._saving.dropped:
            return False
        # No block of this chunk can end before `reach`, so older rows of a window are in none.
        reach = min(self._cache.length, chunk_stop)
        firsts = tuple(
            self._at if window is None else min(stop, max(self._at, reach - window))
            for window in self._geometry.windows
        )
        try:
            words = self._words(firsts, stop)
        except Exception as error:  # outermost loop of one recording: its answer and the engine go on without it
            shown = str(error) if isinstance(error, CacheError) else type(error).__name__
            log.warning("recording_abandoned reason=%s", shown)
            self.abandon()
            return False
        self._saving.add(Slab(self._at, stop, pack_ids(self._ids[self._at : stop]), firsts, words))
        self._at = stop
        return True

    def _words(self, firsts: tuple[int, ...], stop: int) -> np.ndarray:
        parts = [
            plane.view(mx.uint16).reshape(-1)
            for layer, first in enumerate(firsts)
            if first < stop
            for plane in self._cache.planes(layer, first, stop)
        ]
        return np.array(mx.concatenate(parts)) if parts else np.empty(0, np.uint16)


class Recording:
    """What the engine's thread needs to have its generations saved."""

    def __init__(self, keeper: Keeper, geometry: Geometry, chunk_tokens: int) -> None:
        self._keeper, self._geometry, self._chunk_tokens = keeper, geometry, chunk_tokens
        self._closing: list[Recorder] = []

    def begin(self, cache: Cache, ids: list[int], last: Block | None, decoded_from: int | None) -> Recorder:
        """Return the recorder of a cache that holds what this node held, from `decoded_from` on by decode.

        `last` is the last block that was installed: its rows need not be copied back out of the cache.
        """
        length, prefilled = cache.length, len(ids) - 1 if decoded_from is None else decoded_from
        boundary = length // self._chunk_tokens * self._chunk_tokens
        if last is not None and last.head.start == boundary < length <= last.head.stop:
            start, saving = length, self._keeper.saving(ids, boundary, prefilled, HeldPart(last, length))
        else:
            start, saving = boundary, self._keeper.saving(ids, boundary, prefilled)
        return Recorder(cache, ids, start, saving, geometry=self._geometry, chunk_tokens=self._chunk_tokens)

    def close(self, recorder: Recorder) -> None:
        """Let the last rows of an ended generation follow."""
        recorder.close()
        self._closing.append(recorder)

    def advance(self) -> bool:
        """Copy one slab of one ended generation; return whether there was one."""
        if not self._closing:
            return False
        if not self._closing[0].finish():
            del self._closing[0]
        return True
