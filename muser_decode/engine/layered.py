"""What is common to the caches of one generation, whichever library computes with their rows."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from muser_decode.errors import CacheError

GROWTH_TOKENS = 512
"""Capacity grows to the next multiple of this."""

ROLLBACK_TOKENS = 16
"""How many of the last positions can be taken back: a drafted block, or a step launched in vain."""

SLACK_TOKENS = ROLLBACK_TOKENS + 112
"""Room of a sliding layer beyond its window: what a rollback brings back, and so many tokens between two moves."""


def capacity_of(positions: int, most: int) -> int:
    """Return for how many positions there is room once there is room for so many."""
    return min(-(-positions // GROWTH_TOKENS) * GROWTH_TOKENS, most)


class Bounded(Protocol):
    """One layer's rows, as far as `LayeredCache` is concerned."""

    first: int

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, or as many as this layer ever keeps."""

    def needed_from(self, position: int) -> int:
        """Return the first position that a query at `position` sees."""


L = TypeVar("L", bound=Bounded)


class LayeredCache(Generic[L]):
    """What is common to caches of positions [0, length), however a layer keeps its rows."""

    def __init__(self, layers: list[L], max_positions: int) -> None:
        self._layers, self._max_positions = layers, max_positions
        self._capacity = 0
        self._length = self._furthest = 0

    @property
    def length(self) -> int:
        """Positions that are complete in every layer."""
        return self._length

    @property
    def capacity(self) -> int:
        """Positions for which there is memory; sliding layers have less, and need no more."""
        return self._capacity

    def reserve(self, positions: int) -> None:
        """Make room for positions [0, positions), keeping what is there.

        Raises:
            CacheError: the model has fewer positions.
        """
        if positions <= self._capacity:
            return
        if positions > self._max_positions:
            raise CacheError(f"{positions} positions asked, the model has {self._max_positions}")
        self._capacity = capacity_of(positions, self._max_positions)
        for layer in self._layers:
            layer.grow(self._capacity)

    def commit(self, length: int) -> None:
        """Declare positions [0, length) complete in every layer."""
        if not self._length <= length <= self._capacity:
            raise CacheError(f"cannot commit {length} positions after {self._length}, with room for {self._capacity}")
        self._length = length
        self._furthest = max(self._furthest, length)

    def rollback(self, length: int) -> None:
        """Take back the positions from `length` on: at most ROLLBACK_TOKENS below the furthest ever committed.

        Raises:
            CacheError: further back, or to a place before which a window was never here, inside an
                installed chunk.
        """
        if not self._furthest - ROLLBACK_TOKENS <= length <= self._length:
            raise CacheError(f"cannot roll back from {self._length} to {length}: {self._furthest} were reached")
        for index, layer in enumerate(self._layers):
            if layer.first > layer.needed_from(length):
                raise CacheError(f"cannot roll back to {length}: layer {index} starts at {layer.first}")
        self._length = length

    def check_range(self, start: int, stop: int) -> None:
        """Check that positions [start, stop) are complete.

        Raises:
            CacheError: they are not.
        """
        if not 0 <= start <= stop <= self._length:
            raise CacheError(f"positions {start} to {stop} asked, {self._length} are there")
