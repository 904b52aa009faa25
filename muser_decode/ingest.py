"""Ingest: one remote handoff as a KV source. Verifies each segment into a staging slot, posts whole chunks.

Its thread decrypts straight into the slot's memory and calls no mlx. A chunk is posted once its last
segment is verified; only a verified seal ends the handoff well. A watch ends it when the producer
stops making progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from muser_decode.client import OpenedHandoff, ProducerClient
from muser_decode.engine.source import (
    Piece,
    SlotPool,
    SourceDone,
    SourceFailed,
    StagedChunk,
    StagingSlot,
    copied_rows,
)
from muser_decode.observer import HandoffEnd, Observer, Unobserved
from muser_wire.errors import (
    GeometryError,
    HandoffRefused,
    IdentityMismatch,
    ProgressTimeout,
    RemoteProtocolError,
    TransportError,
    WireError,
)
from muser_wire.handoff import Sealed, SegmentVerified
from muser_wire.kvpack.block import pack_ids
from muser_wire.schedule import Schedule, Segment
from muser_wire.session import ProgressWatch
from muser_wire.trace import now_ns, span

WATCH_S = 0.1
"""How often, in seconds, the progress watch and a wait for a slot look up."""

CANCEL_GRACE_S = 1.0
"""How long a cancelled handoff waits for its begin frame, in seconds: a thousand round trips."""

SLOT_WAIT_S = 120.0
"""How long a handoff waits for staging memory, in seconds: other requests' chunks take some 10 s each on a slow CPU."""

REFUSALS = frozenset(
    {
        *("draining", "stale_incarnation", "identity_mismatch", "prompt_too_long", "bad_token", "busy"),
        *("geometry", "window_policy", "unpaired", "invalid_request", "unknown", "unreachable", "refused"),
    }
)
"""Why a handoff may be refused: the wire's codes [5.6], and what this node knew before it asked."""

_log = logging.getLogger(__name__)


class NoStagingMemory(TransportError):
    """This node had no memory for what came: its own doing."""

    code = "no_staging_memory"


class RemoteSource:
    """See `muser_decode.engine.source.KVSource`: the engine's thread calls, a thread of its own receives.

    `held_tokens` leading tokens are in the engine's cache when this begins.
    """

    def __init__(
        self,
        client: ProducerClient,
        prompt_ids: Sequence[int],
        held_tokens: int = 0,
        observer: Observer | None = None,
    ) -> None:
        self._client = client
        self._observer = observer or Unobserved()
        self._prompt_ids = prompt_ids
        self._held_tokens = held_tokens
        self._lock = threading.Lock()
        self._posted: deque[StagedChunk | SourceDone | SourceFailed] = deque()
        self._cancelled = threading.Event()
        self._receiver: _Receiver | None = None
        self._slots: SlotPool | None = None

    def begin(self, slots: SlotPool) -> None:
        """See `KVSource`."""
        self._slots = slots
        threading.Thread(target=self._run, args=(slots,), name="ingest", daemon=True).start()

    def poll(self) -> StagedChunk | SourceDone | SourceFailed | None:
        """See `KVSource`."""
        with self._lock:
            return self._posted.popleft() if self._posted else None

    def cancel(self) -> None:
        """See `KVSource`. Nothing stays posted afterwards, whether the handoff still runs or has ended."""
        with self._lock:
            self._cancelled.set()
            receiver = self._receiver
            unpolled, self._posted = self._posted, deque()
        for item in unpolled:
            self._give_back(item)
        if receiver is not None:
            receiver.cancel()

    def _run(self, slots: SlotPool) -> None:
        receiver: _Receiver | None = None
        started = time.monotonic()
        key = self._client.standing.opened(len(self._prompt_ids), started)
        code, error = "sealed", None
        try:
            opened = self._client.open(self._prompt_ids, self._held_tokens)
            receiver = _Receiver(opened, self._prompt_ids, slots, self._cancelled, self._client.name)
            with self._lock:
                self._receiver = receiver
                cancelled = self._cancelled.is_set()
            if cancelled:
                receiver.cancel()
            for chunk in receiver.chunks():
                self._post(chunk)
            ending: SourceDone | SourceFailed = receiver.done()
            self._client.standing.completed(receiver.link_nbytes_per_s(), time.monotonic())
        except WireError as caught:
            error, code = caught, stable_code(caught)
            ending = self._failed(receiver, code, f"{caught.code}: {caught}")
        except Exception as caught:  # outermost: whatever broke, the engine must hear of it and go on locally
            _log.exception("ingest_failed")
            code = "internal"
            ending = self._failed(receiver, code, f"internal: {type(caught).__name__}")
        finally:
            self._client.standing.ended(key)
        # The engine waits for this; who counts can wait.
        self._post(ending)
        if code == "sealed":
            self._client.standing.remember(self._prompt_ids[:-1])
        self._account(ending, code, error, time.monotonic() - started)

    def _failed(self, receiver: _Receiver | None, code: str, reason: str) -> SourceFailed:
        failed = SourceFailed(reason, 0.0, 0, 0, "", code) if receiver is None else receiver.failed(code, reason)
        if not self._cancelled.is_set():
            handoff = failed.handoff_id or "-"
            _log.warning("handoff_failed handoff=%s producer=%s reason=%s", handoff, self._client.name, reason)
        return failed

    def _account(self, ending: SourceDone | SourceFailed, code: str, error: WireError | None, seconds: float) -> None:
        """Tell the producer's standing, and the observer, how the handoff ended; a cancelled one was nobody's fault."""
        cancelled = self._cancelled.is_set() and code != "sealed"
        if error is not None and not cancelled and to_blame(error):
            self._client.standing.failed(time.monotonic())
            self._client.look()
        self._observer.handoff_ended(
            HandoffEnd(
                producer=self._client.name,
                code="cancelled" if cancelled else code,
                seconds=seconds,
                segments_verified=ending.segments_verified,
                payload_nbytes=ending.payload_nbytes,
                frame_refused=not cancelled and isinstance(error, RemoteProtocolError),
            )
        )

    def _post(self, item: StagedChunk | SourceDone | SourceFailed) -> None:
        """Hand something to the engine; after a cancel nobody polls, so a slot goes straight back."""
        with self._lock:
            wanted = not self._cancelled.is_set()
            if wanted:
                self._posted.append(item)
        if not wanted:
            self._give_back(item)
        elif self._slots is not None:
            self._slots.wake()

    def _give_back(self, item: StagedChunk | SourceDone | SourceFailed) -> None:
        if isinstance(item, StagedChunk) and self._slots is not None:
            self._slots.release(item.slot)


def stable_code(error: WireError) -> str:
    """Return one of a bounded number of words for an error; what a peer said is not among them.

    >>> stable_code(HandoffRefused("busy", "later")), stable_code(HandoffRefused("nonsense", "of a peer"))
    ('refused_busy', 'refused')
    """
    if isinstance(error, HandoffRefused) and error.reason in REFUSALS:
        return f"refused_{error.reason}"
    return error.code


def to_blame(error: WireError) -> bool:
    """Say whether a producer, or the way to it, is why a handoff broke; one that is busy is well."""
    if isinstance(error, NoStagingMemory):
        return False
    return isinstance(error, TransportError | RemoteProtocolError | IdentityMismatch)


class _Receiver:
    """Reads one opened handoff to its end, on the ingest thread."""

    def __init__(
        self,
        opened: OpenedHandoff,
        prompt_ids: Sequence[int],
        slots: SlotPool,
        cancelled: threading.Event,
        producer: str,
    ) -> None:
        self._opened = opened
        self._prompt_ids = prompt_ids
        self._slots = slots
        self._cancelled = cancelled
        self._watch = ProgressWatch(opened.predicted_chunk_s, opened.predicted_wait_s, time.monotonic())
        self._stalled: ProgressTimeout | None = None
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._staging = _Staging(opened.schedule, self._wait_for_slot, producer)
        self._first_segment: tuple[float, int] | None = None
        self._last_segment_s = 0.0
        self._first_frame_s = self._last_frame_s = time.monotonic()
        self._segments = 0
        self._payload_nbytes = 0
        self._reused_tokens = 0

    def cancel(self) -> None:
        """End the stream from another thread, once the producer has begun.

        A call that is cancelled on its way would leave the ticket unused, and its place in the producer's
        queue taken until the ticket expires. The begin frame comes at once; who waits for it longer than
        CANCEL_GRACE_S gives up.
        """
        if self._begun.is_set():
            self._opened.stream.cancel()

    def chunks(self) -> Iterator[StagedChunk]:
        """Yield each chunk when its last segment is verified; return after a verified seal and the stream's end.

        Raises:
            WireError: the handoff broke; chunks already yielded stay valid.
        """
        threading.Thread(target=self._watch_progress, name="ingest-watch", daemon=True).start()
        try:
            yield from self._receive()
        except TransportError as error:
            raise self._stalled or error from error
        finally:
            self._ended.set()
            self._opened.stream.cancel()
            abandoned = self._staging.abandon()
            if abandoned is not None:
                self._slots.release(abandoned)

    def done(self) -> SourceDone:
        """Return the report of a handoff that ended well."""
        ended = (self._wire_s(), self._segments, self._payload_nbytes, self._handoff_id())
        return SourceDone(*ended, self._reused_tokens)

    def failed(self, code: str, reason: str) -> SourceFailed:
        """Return the report of a handoff that broke."""
        return SourceFailed(reason, self._wire_s(), self._segments, self._payload_nbytes, self._handoff_id(), code)

    def link_nbytes_per_s(self) -> float | None:
        """Return how fast the bytes after the first segment came; that one waited for its computation."""
        if self._first_segment is None or self._last_segment_s <= self._first_segment[0]:
            return None
        began_s, nbytes = self._first_segment
        return (self._payload_nbytes - nbytes) / (self._last_segment_s - began_s)

    def _receive(self) -> Iterator[StagedChunk]:
        handoff = self._opened.handoff
        first = True
        for raw in self._opened.stream:
            self._last_frame_s = time.monotonic()
            if first:
                self._first_frame_s, first = self._last_frame_s, False
            started_ns = now_ns()
            self._begun.set()
            if self._cancelled.is_set():
                raise TransportError("the handoff was cancelled")
            event = handoff.receive(raw, self._staging.destination)
            self._watch.progress(time.monotonic())
            if isinstance(event, Sealed):
                self._reused_tokens = event.reused_tokens
            if isinstance(event, SegmentVerified):
                self._watch.computing()
                span("verify", event.segment.index, started_ns)
                self._segments += 1
                self._payload_nbytes += event.segment.nbytes
                self._last_segment_s = self._last_frame_s
                self._first_segment = self._first_segment or (self._last_frame_s, event.segment.nbytes)
                chunk = self._staging.verified(event.segment)
                if chunk is not None:
                    yield self._with_slab(chunk)
        handoff.end_of_input()

    def _with_slab(self, chunk: StagedChunk) -> StagedChunk:
        """Return a chunk with a copy of its rows where they are saved: this thread has time, the engine's has not.

        The last one's are copied later: the first token waits for that chunk.
        """
        request = self._opened.schedule.request
        if not self._slots.keeps or chunk.stop == request.prompt_tokens - 1:
            return chunk
        ids = pack_ids(self._prompt_ids[chunk.start : chunk.stop])
        try:
            return replace(chunk, slab=copied_rows(chunk, ids, request.geometry))
        except MemoryError:
            return chunk

    def _wait_for_slot(self) -> StagingSlot:
        """Return a free slot. While this side waits for its own engine, the producer is not to blame.

        Raises:
            TransportError: the handoff was cancelled, or no slot became free in time.
        """
        deadline = time.monotonic() + SLOT_WAIT_S
        while not self._cancelled.is_set() and time.monotonic() < deadline:
            slot = self._slots.acquire(WATCH_S)
            self._watch.progress(time.monotonic())
            if slot is not None:
                return slot
        if self._cancelled.is_set():
            raise TransportError("the handoff was cancelled while it waited for memory")
        raise NoStagingMemory(f"no staging memory became free within {SLOT_WAIT_S:.0f} s")

    def _watch_progress(self) -> None:
        cancelled_s = 0.0
        while not self._ended.wait(WATCH_S):
            cancelled_s += WATCH_S if self._cancelled.is_set() else 0.0
            if cancelled_s > CANCEL_GRACE_S:
                self._opened.stream.cancel()
                return
            try:
                self._watch.check(time.monotonic())
            except ProgressTimeout as error:
                self._stalled = error
                self._opened.stream.cancel()
                return

    def _wire_s(self) -> float:
        return self._last_frame_s - self._first_frame_s

    def _handoff_id(self) -> str:
        return self._opened.handoff.handoff_id.hex()


class _Staging:
    """The chunk that is being filled: its slot, and where each segment lies in it."""

    def __init__(self, schedule: Schedule, new_slot: Callable[[], StagingSlot], producer: str) -> None:
        self._producer = producer
        self._chunks = {chunk.index: chunk for chunk in schedule.chunks}
        self._new_slot = new_slot
        self._slot: StagingSlot | None = None
        self._filled_nbytes = 0
        self._pieces: list[Piece] = []

    def destination(self, segment: Segment) -> memoryview:
        """Return the memory for a segment's payload; the first of a chunk waits for a slot."""
        if self._slot is None:
            chunk = self._chunks[segment.chunk_index]
            slot = self._new_slot()
            self._slot = slot
            if chunk.nbytes > len(slot.memory):
                raise GeometryError(f"a chunk of {chunk.nbytes} bytes does not fit a slot of {len(slot.memory)}")
        return self._slot.memory[self._filled_nbytes : self._filled_nbytes + segment.nbytes]

    def verified(self, segment: Segment) -> StagedChunk | None:
        """Note a verified segment; return its chunk when it was the last one."""
        base = self._filled_nbytes
        self._pieces += [
            Piece(s.layer, s.start, s.stop, base + s.offset, base + s.offset + s.nbytes // 2) for s in segment.slices
        ]
        self._filled_nbytes += segment.nbytes
        chunk = self._chunks[segment.chunk_index]
        if segment.index != chunk.segments[-1].index or self._slot is None:
            return None
        staged = StagedChunk(chunk.start, chunk.stop, self._slot, tuple(self._pieces), producer=self._producer)
        self._slot, self._filled_nbytes, self._pieces = None, 0, []
        return staged

    def abandon(self) -> StagingSlot | None:
        """Return the slot of a chunk that never became whole, if there is one."""
        slot, self._slot = self._slot, None
        return slot
