"""What the engine needs of a decoder and of its caches, in either lane: the native one's classes say what each does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from muser_wire.geometry import Geometry
from muser_wire.model.spec import ModelSpec


class Cache(Protocol):
    """The keys and values of one generation; see `muser_decode.engine.cache.KVCache`."""

    @property
    def length(self) -> int:
        """Positions that are complete in every layer."""

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate so that everything written is in memory."""

    def reserve(self, positions: int) -> None:
        """Make room for positions [0, positions), keeping what is there."""

    def install(self, layer: int, start: int, k: mx.array, v: mx.array) -> None:
        """Write planes at positions from `start`."""

    def commit(self, length: int) -> None:
        """Declare positions [0, length) complete in every layer."""

    def rollback(self, length: int) -> None:
        """Take back the positions from `length` on."""

    def planes(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of [start, stop) as they travel."""


class Decoder(Protocol):
    """A model that computes; see `muser_decode.decoder.MlxDecoder`.

    A cache in an argument is one that `new_cache` of the same decoder made; no type says so.
    """

    spec: ModelSpec
    geometry: Geometry

    def new_cache(self) -> Cache:
        """Return an empty cache for one generation."""

    def cache_nbytes(self, positions: int) -> int:
        """Return the memory, in bytes, of a cache of so many positions."""

    def prefill_chunk(self, ids: Sequence[int], cache: Any, go_on: Callable[[], bool] | None = None) -> bool:
        """Compute keys and values of `ids` at the positions after the cache's last, and evaluate them."""

    def step(self, token: mx.array, cache: Any) -> mx.array:
        """Return the logits after `token`, and take it into the cache."""

    def steps(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Return the logits after one token of each of several caches' sequences."""
