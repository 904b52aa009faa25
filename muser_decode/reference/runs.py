"""What one run through the layers works on: the next tokens of one sequence, or one token of each of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from muser_decode.reference.attention import Attention, RowSpan, spans
from muser_decode.reference.cache import ReferenceCache
from muser_decode.reference.layer import Rope
from muser_decode.reference.planes import Rows, Seen

Tables = tuple[mx.array, mx.array]


class Run(Protocol):
    """Rows of one run. Those of a layer are `[heads, rows, head_dim]`."""

    def table(self, rope: Rope) -> Tables:
        """Return a table's rows for the run's positions."""

    def write(self, layer: int, rows: Rows) -> list[Seen]:
        """Append one layer's rows; return what each sequence's queries see."""

    def attended(self, attention: Attention, window: int | None, q: mx.array, seen: list[Seen]) -> mx.array:
        """Return attention `[rows, heads * head_dim]` of quantised queries `[heads, groups, rows, group]`."""

    def commit(self) -> None:
        """Declare the rows complete in every layer."""


class ChunkRun(Run):
    """The next `tokens` tokens of one cache's sequence."""

    def __init__(self, cache: ReferenceCache, tokens: int) -> None:
        self._cache, self._start, self._tokens = cache, cache.length, tokens
        cache.reserve(self._start + tokens)
        self._tables: dict[Rope, Tables] = {}
        self._spans: dict[int | None, tuple[RowSpan, ...]] = {}

    def table(self, rope: Rope) -> Tables:
        """See `Run`."""
        if rope not in self._tables:
            self._tables[rope] = rope.at(range(self._start, self._start + self._tokens))
        return self._tables[rope]

    def write(self, layer: int, rows: Rows) -> list[Seen]:
        """See `Run`."""
        return [self._cache.append(layer, rows)]

    def attended(self, attention: Attention, window: int | None, q: mx.array, seen: list[Seen]) -> mx.array:
        """See `Run`."""
        if window not in self._spans:
            self._spans[window] = spans(self._start, self._tokens, window)
        return attention(q, seen[0], self._spans[window])

    def commit(self) -> None:
        """See `Run`."""
        self._cache.commit(self._start + self._tokens)


class StepRun(Run):
    """The next token of each of several caches' sequences, in this order."""

    def __init__(self, caches: Sequence[ReferenceCache]) -> None:
        self._each = [ChunkRun(cache, 1) for cache in caches]
        self._positions = [cache.length for cache in caches]
        self._tables: dict[Rope, Tables] = {}

    def table(self, rope: Rope) -> Tables:
        """See `Run`."""
        if len(self._each) == 1:
            return self._each[0].table(rope)
        if rope not in self._tables:
            self._tables[rope] = rope.at(self._positions)
        return self._tables[rope]

    def write(self, layer: int, rows: Rows) -> list[Seen]:
        """See `Run`."""
        if len(self._each) == 1:
            return self._each[0].write(layer, rows)
        return [seen for at, run in enumerate(self._each) for seen in run.write(layer, rows.part(at, at + 1))]

    def attended(self, attention: Attention, window: int | None, q: mx.array, seen: list[Seen]) -> mx.array:
        """See `Run`."""
        if len(self._each) == 1:
            return self._each[0].attended(attention, window, q, seen)
        outputs = [
            run.attended(attention, window, q[:, :, at : at + 1], [own])
            for at, (run, own) in enumerate(zip(self._each, seen, strict=True))
        ]
        return mx.concatenate(outputs)

    def commit(self) -> None:
        """See `Run`."""
        for run in self._each:
            run.commit()
