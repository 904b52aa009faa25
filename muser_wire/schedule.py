"""The schedule: which segments a handoff consists of, in which order [4].

A pure function of geometry, prompt length, what the consumer holds, grid and window policy. Both
sides derive it and compare digests; a segment that is not the next one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from muser_wire.errors import GeometryError
from muser_wire.geometry import Geometry, kv_layout
from muser_wire.identities import Digest, digest_of

SCHEDULE_VERSION = 1
SEGMENT_TARGET_NBYTES = 1 << 20
"""Payload that a segment aims at: gRPC carries 1 MiB messages fastest, both smaller and larger ones cost more."""

DEFAULT_CHUNK_TOKENS = 2048
"""The grid, in tokens: large enough to keep a GPU busy, small enough to salvage and to reuse."""

MAX_PROMPT_TOKENS = 1 << 20
"""Upper bound on a prompt, in tokens: caps what a request can make either side allocate."""

MAX_CHUNK_TOKENS = 1 << 16
"""Upper bound on the grid, in tokens."""


class WindowPolicy(Enum):
    """Which planes of sliding layers travel [4.4].

    FINAL: the last window only. ROLLING: the window at every chunk boundary, so that each one is a
    complete resume point.
    """

    FINAL = "final"
    ROLLING = "rolling"


@dataclass(frozen=True)
class SegmentSlice:
    """The planes of one layer for tokens [start, stop), at `offset` bytes in its segment's payload.

    Keys come first, `nbytes / 2` of them, then the values of the same tokens.
    """

    layer: int
    start: int
    stop: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Segment:
    """One unit of transfer: slices of one chunk, in layer order. `index` counts from 0 over the handoff."""

    index: int
    chunk_index: int
    slices: tuple[SegmentSlice, ...]

    @property
    def nbytes(self) -> int:
        """Payload size, in bytes; framing and tag are not counted."""
        last = self.slices[-1]
        return last.offset + last.nbytes

    @property
    def last_layer(self) -> int:
        """The layer that must be computed before this segment can leave."""
        return self.slices[-1].layer


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) between two boundaries of the grid, and the segments that carry them."""

    index: int
    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Payload of all segments, in bytes."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class ScheduleRequest:
    """What a schedule is computed from.

    `prompt_tokens` counts the whole prompt; the last token is held back for the decode node [4.1].
    `held_tokens` is how many leading tokens the consumer already holds, sliding windows included.
    """

    geometry: Geometry
    prompt_tokens: int
    held_tokens: int
    chunk_tokens: int
    policy: WindowPolicy

    def __post_init__(self) -> None:
        if not 2 <= self.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise GeometryError(f"a handoff needs 2 to {MAX_PROMPT_TOKENS} prompt tokens, not {self.prompt_tokens}")
        if not 0 <= self.held_tokens < self.prompt_tokens - 1:
            raise GeometryError(f"{self.held_tokens} held tokens leave nothing of {self.prompt_tokens - 1} to send")
        if not 1 <= self.chunk_tokens <= MAX_CHUNK_TOKENS:
            raise GeometryError(f"a chunk has 1 to {MAX_CHUNK_TOKENS} tokens, not {self.chunk_tokens}")


@dataclass(frozen=True)
class Schedule:
    """The chunks of one handoff in the order in which they travel."""

    request: ScheduleRequest
    chunks: tuple[Chunk, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, in the order of the wire."""
        return tuple(segment for chunk in self.chunks for segment in chunk.segments)

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of all planes, without framing and tags."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @cached_property
    def digest(self) -> Digest:
        """The identity of this schedule: of its inputs and of every slice derived from them [4.5]."""
        request = self.request
        head = (
            f"{SCHEDULE_VERSION} {kv_layout(request.geometry.element)} {request.geometry.kv_heads} "
            f"{request.geometry.head_dim} {request.geometry.windows} {request.prompt_tokens} "
            f"{request.held_tokens} {request.chunk_tokens} {request.policy.value}"
        )
        rows = "\n".join(
            f"{segment.index} {segment.chunk_index} {piece.layer} {piece.start} {piece.stop} {piece.offset}"
            for segment in self.segments
            for piece in segment.slices
        )
        return digest_of(b"muser schedule 1", head.encode(), rows.encode())


def build_schedule(request: ScheduleRequest) -> Schedule:
    """Return the schedule of a handoff: chunk by chunk on the grid anchored at 0, in layer order within a chunk."""
    chunks: list[Chunk] = []
    segment_index = 0
    for chunk_index, start, stop in _grid(request):
        segments = tuple(_segments(request, chunk_index, start, stop, segment_index))
        segment_index += len(segments)
        chunks.append(Chunk(chunk_index, start, stop, segments))
    return Schedule(request, tuple(chunks))


def _grid(request: ScheduleRequest) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk index, start, stop) of what travels; the first chunk may begin inside its cell of the grid."""
    start, end = request.held_tokens, request.prompt_tokens - 1
    while start < end:
        index = start // request.chunk_tokens
        stop = min(end, (index + 1) * request.chunk_tokens)
        yield index, start, stop
        start = stop


def _layer_range(request: ScheduleRequest, window: int | None, start: int, stop: int) -> tuple[int, int]:
    """Return the tokens of [start, stop) that travel for a layer with this window; empty when first >= last."""
    if window is None:
        return start, stop
    boundary = request.prompt_tokens - 1 if request.policy is WindowPolicy.FINAL else stop
    return max(start, boundary - window), stop


def _segments(request: ScheduleRequest, chunk_index: int, start: int, stop: int, first_index: int) -> Iterator[Segment]:
    """Yield the segments of one chunk: layers cut along tokens when large, neighbours joined when small."""
    token_nbytes = request.geometry.layer_token_nbytes
    index = first_index
    pending: list[SegmentSlice] = []
    pending_nbytes = 0
    for layer, window in enumerate(request.geometry.windows):
        first, last = _layer_range(request, window, start, stop)
        for cut_start, cut_stop in _cuts(first, last, token_nbytes):
            nbytes = (cut_stop - cut_start) * token_nbytes
            if pending and pending_nbytes + nbytes > SEGMENT_TARGET_NBYTES:
                yield Segment(index, chunk_index, tuple(pending))
                index, pending, pending_nbytes = index + 1, [], 0
            pending.append(SegmentSlice(layer, cut_start, cut_stop, pending_nbytes, nbytes))
            pending_nbytes += nbytes
    if pending:
        yield Segment(index, chunk_index, tuple(pending))


def _cuts(first: int, last: int, token_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield near-equal token ranges of [first, last), each of at most SEGMENT_TARGET_NBYTES where a token allows it."""
    tokens = last - first
    if tokens <= 0:
        return
    parts = min(tokens, -(-tokens * token_nbytes // SEGMENT_TARGET_NBYTES))
    for part in range(parts):
        yield first + tokens * part // parts, first + tokens * (part + 1) // parts
