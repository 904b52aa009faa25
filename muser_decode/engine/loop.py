"""The engine: one thread owns mlx and serves every active generation.

A turn of its loop is one step of all that decode, then one unit of one whose cache is being filled. mlx
evaluates on one thread only, so decoder, caches and staging buffers are made on the engine's thread and never
leave it. Other threads hand in requests and cancellations, and fill staging memory; events go out through each
request's sink, called on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from muser_decode.engine.batch import Batch, Outcome
from muser_decode.engine.contract import Decoder
from muser_decode.engine.decoding import Decoding
from muser_decode.engine.floor import Floor
from muser_decode.engine.generation import Generation, Room
from muser_decode.engine.memory import CacheMemory, default_nbytes, machine_nbytes
from muser_decode.engine.prefilling import Workshop
from muser_decode.engine.recording import Recording
from muser_decode.engine.request import EventSink, FinishReason, GenerationRequest
from muser_decode.engine.source import KVSource
from muser_decode.engine.staging import Staging
from muser_decode.errors import DecodeError, EngineBusy, EngineStopped, RequestInvalid
from muser_decode.keeper import Keeper
from muser_wire.model.spec import ModelSpec

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH = 8
"""Generations served at once: each holds a cache, and makes a step of all a little longer."""

IDLE_S = 1.0
"""How long the thread sleeps at most when there is nothing to do, in seconds: its heartbeat."""

STALL_S = 60.0
"""No heartbeat for so long means a stuck engine: longer than any layer of 128 tokens takes, or any step."""


@dataclass(frozen=True)
class Submission:
    """A request, where its events go, and what brings its prompt's cache; without a source, `reason` says why."""

    request: GenerationRequest
    sink: EventSink
    source: KVSource | None = None
    reason: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. `max_queue` counts generations that wait beside the `max_batch` that run.

    `memory_nbytes` bounds the caches of those that run and what is kept in memory of others; None: what the
    machine has left once the model is loaded. No request runs longer than `deadline_s` seconds, if that is given.
    Without a heartbeat for `stall_s` seconds the engine is not healthy.
    """

    chunk_tokens: int
    max_queue: int
    staging_nbytes: int
    staging_slots: int = 2
    max_batch: int = DEFAULT_MAX_BATCH
    memory_nbytes: int | None = None
    deadline_s: float | None = None
    stall_s: float = STALL_S


class Engine:
    """Runs generations on a decoder that `decoder_factory` makes on the engine's own thread.

    `sizes` are the fields of an `EngineConfig`.
    """

    def __init__(self, decoder_factory: Callable[[], Decoder], *, keeper: Keeper | None = None, **sizes: Any) -> None:
        self._factory = decoder_factory
        self._keeper = keeper
        self._config = EngineConfig(**sizes)
        self._thread = threading.Thread(target=self._run, name="muser-engine", daemon=True)
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._filling: deque[Generation] = deque()
        self._decoding: dict[Decoding, Generation] = {}
        self._unfinished = 0
        self._accepting = False
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._loaded = threading.Event()
        self._load_error: BaseException | None = None
        self._floor: Floor | None = None
        self.last_progress = time.monotonic()
        """Monotonic time, in seconds, at which the thread last finished a layer or a step or found nothing to do."""

    def start(self) -> None:
        """Start the thread and wait until the model is loaded.

        Raises:
            Exception: whatever the factory raised.
        """
        self._thread.start()
        self._loaded.wait()
        if self._load_error is not None:
            self._thread.join()
            raise self._load_error

    def stop(self, drain_s: float = 0.0) -> bool:
        """Refuse new requests, give those accepted `drain_s` seconds to end, cancel the rest, end the thread.

        Returns False when the thread is still in a unit after `stall_s` more; it dies with the process.
        """
        with self._lock:
            self._accepting = False
        deadline = time.monotonic() + drain_s
        while self._thread.is_alive() and self._unfinished and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(self._config.stall_s)
        return not self._thread.is_alive()

    def submit(
        self, request: GenerationRequest, sink: EventSink, source: KVSource | None = None, reason: str = ""
    ) -> Generation:
        """Accept one request; see `Submission` and `submit_all`."""
        return self.submit_all([Submission(request, sink, source, reason)])[0]

    def submit_all(self, parts: Sequence[Submission]) -> list[Generation]:
        """Accept all of several requests, or none; the last event of each is Finished or Failed.

        When this raises, no source was touched.

        Raises:
            RequestInvalid: a prompt is empty, leaves no position for an answer, or needs more memory than there is.
            EngineBusy: too many requests wait.
            EngineStopped: the engine does not run.
        """
        generations = [
            Generation(
                with_deadline(part.request, self._config.deadline_s), part.sink, part.source, part.reason, self.wake
            )
            for part in parts
        ]
        with self._lock:
            if not self._accepting or self._floor is None:
                raise EngineStopped("the engine does not take requests")
            for generation in generations:
                check_request(generation.request, self._floor.spec)
                self._floor.check_memory(generation.request)
            if self._unfinished + len(generations) > self.places:
                raise EngineBusy(f"{self._unfinished} requests are running or waiting")
            self._unfinished += len(generations)
            self._waiting.extend(generations)
        self._woken.set()
        return generations

    def wake(self) -> None:
        """Have the thread look for news at once. Callable from any thread."""
        self._woken.set()

    def healthy(self) -> bool:
        """Say whether the engine takes requests and its thread makes progress."""
        return (
            self._accepting and self._thread.is_alive() and time.monotonic() - self.last_progress < self._config.stall_s
        )

    @property
    def context_tokens(self) -> int:
        """How many tokens a prompt and its answer may have together, by the model and by memory; 0 before `start`."""
        return 0 if self._floor is None else self._floor.context_tokens

    @property
    def places(self) -> int:
        """Requests that run or wait at most."""
        return self._config.max_batch + self._config.max_queue

    @property
    def waiting(self) -> int:
        """Requests accepted and not yet begun."""
        return len(self._waiting)

    @property
    def load(self) -> int:
        """Requests accepted and not yet ended."""
        return self._unfinished

    # On the engine's thread

    def _run(self) -> None:
        """Load, serve until told to stop, end what is left."""
        try:
            floor = self._load()
        except Exception as error:  # outermost: `start` raises it on the caller's thread
            self._load_error = error
            self._loaded.set()
            return
        self._loaded.set()
        try:
            while not self._stopping.is_set():
                self._turn(floor)
        except Exception:  # outermost loop of the engine's thread
            log.exception("engine_failed")
        finally:
            floor.workshop.staging.pool.close()
            self._end_all()

    def _load(self) -> Floor:
        decoder, config, keeper = self._factory(), self._config, self._keeper
        staging = Staging(decoder.geometry, config.staging_slots, config.staging_nbytes, self.wake)
        staging.pool.keeps = keeper is not None
        recording = None if keeper is None else Recording(keeper, decoder.geometry, config.chunk_tokens)
        total = config.memory_nbytes
        if total is None:
            total = default_nbytes(machine_nbytes(), mx.get_active_memory())
        log.info("cache_memory nbytes=%d", total)
        memory = CacheMemory(total, None if keeper is None else keeper.store.bound_memory)
        workshop = Workshop(decoder, staging, config.chunk_tokens, recording)
        self._floor, self._accepting = Floor(workshop, Batch(decoder), memory), True
        self._beat()
        return self._floor

    def _beat(self) -> None:
        self.last_progress = time.monotonic()

    def _turn(self, floor: Floor) -> None:
        """Admit what fits, step all that decode, do one unit of filling; sleep if there was nothing to do."""
        self._woken.clear()
        self._end_leaving(floor)
        self._admit(floor)
        progressed = self._step(floor)
        progressed |= self._fill(floor)
        if floor.workshop.recording is not None:
            progressed |= floor.workshop.recording.advance()
        if not progressed:
            self._woken.wait(self._patience_s())
        self._beat()

    def _patience_s(self) -> float:
        """Return how long to sleep: until the first deadline at most."""
        deadlines = [generation.deadline_s for generation in (*self._waiting, *self._filling)]
        return max(0.0, min([IDLE_S, *(deadline - time.monotonic() for deadline in deadlines)]))

    def _end_leaving(self, floor: Floor) -> None:
        """End those that were cancelled or are out of time, wherever they are."""
        with self._lock:
            gone = [generation for generation in self._waiting if generation.leaving]
            self._waiting = deque(generation for generation in self._waiting if generation not in gone)
        for generation in [*gone, *self._filling, *self._decoding.values()]:
            reason = generation.leaving
            if reason is not None:
                self._guarded(floor, generation, partial(generation.finish, reason))
        self._sweep(floor)

    def _admit(self, floor: Floor) -> None:
        """Begin as many of those that wait as there are places and memory for, the first ones first."""
        while len(self._filling) + len(self._decoding) < self._config.max_batch:
            with self._lock:
                if not self._waiting or not floor.take_memory(self._waiting[0]):
                    return
                generation = self._waiting.popleft()
            self._filling.append(generation)
            first = floor.first_tokens(generation.request)
            room = Room(first, partial(floor.more_tokens, generation), self._beat)
            self._guarded(floor, generation, partial(generation.admit, floor.workshop, room))
            self._sweep(floor)

    def _step(self, floor: Floor) -> bool:
        """Advance the batch; return whether there was anything in it."""
        if not self._decoding:
            return False
        if floor.batch.begins:
            self._deliver(floor, floor.batch.settle())
        try:
            outcomes = floor.batch.advance()
        except Exception as error:  # outermost loop of the batch: its generations end, the engine goes on
            log.exception("step_failed requests=%d", len(self._decoding))
            for generation in self._decoding.values():
                self._fail(floor, generation, error)
            outcomes = []
        self._deliver(floor, outcomes)
        return True

    def _deliver(self, floor: Floor, outcomes: Sequence[Outcome]) -> None:
        """Hand out what a step gave. Saving rows may wait for the device, so it comes after everyone's token."""
        self._beat()
        served = [(self._decoding[outcome.decoding], outcome) for outcome in outcomes]
        for generation, outcome in served:
            if outcome.error is not None:
                self._fail(floor, generation, outcome.error)
            else:
                self._guarded(floor, generation, partial(generation.take, outcome.token, outcome.likelihood))
        for generation, _ in served:
            if not generation.ended:
                self._guarded(floor, generation, generation.record)
        self._sweep(floor)

    def _fill(self, floor: Floor) -> bool:
        """Do one unit of the first generation that can go on; the others' turn comes before it has another."""
        for generation in list(self._filling):
            if generation.computes:
                # What is drawn by now goes out before the device is busy for a while.
                self._deliver(floor, floor.batch.settle())
            shared = bool(self._decoding)
            if not self._guarded(floor, generation, partial(generation.fill, shared=shared)):
                continue
            self._filling.remove(generation)
            if generation.decoding is not None:
                self._decoding[generation.decoding] = generation
                floor.batch.join(generation.decoding)
            elif not generation.ended:
                self._filling.append(generation)
            return True
        return False

    def _sweep(self, floor: Floor) -> None:
        """Forget those that have ended."""
        self._filling = deque(generation for generation in self._filling if not generation.ended)
        for decoding in [decoding for decoding, generation in self._decoding.items() if generation.ended]:
            del self._decoding[decoding]
            floor.batch.leave(decoding)

    def _guarded(self, floor: Floor, generation: Generation, unit: Callable[[], bool | None]) -> bool:
        """Run a unit; an error in it ends this generation alone. Returns whether anything was done."""
        ended = generation.ended
        try:
            done = unit()
        except Exception as error:  # outermost loop of one generation: the others go on
            log.exception("generation_failed request=%s", generation.request.request_id)
            self._fail(floor, generation, error)
            return True
        if generation.ended and not ended:
            self._count_out(floor, generation)
        return done is not False

    def _fail(self, floor: Floor, generation: Generation, error: Exception) -> None:
        shown = str(error) if isinstance(error, DecodeError) else type(error).__name__
        try:
            generation.fail(f"the engine failed on this request: {shown}")
        except Exception:  # outermost: a sink that fails must not end the engine
            log.exception("sink_failed request=%s", generation.request.request_id)
        self._count_out(floor, generation)

    def _count_out(self, floor: Floor, generation: Generation) -> None:
        floor.give_memory_back(generation)
        with self._lock:
            self._unfinished -= 1

    def _end_all(self) -> None:
        """Cancel everything that has not ended."""
        with self._lock:
            self._accepting = False
            left = [*self._filling, *self._decoding.values(), *self._waiting]
            self._waiting = deque()
        floor = self._floor
        for generation in left:
            if floor is not None and not generation.ended:
                self._guarded(floor, generation, partial(generation.finish, FinishReason.CANCELLED))
        if floor is not None:
            self._sweep(floor)
            recording = floor.workshop.recording
            # What ended just now may be all that a next turn after a restart goes on from.
            while recording is not None and recording.advance():
                self._beat()


def with_deadline(request: GenerationRequest, most_s: float | None) -> GenerationRequest:
    """Return a request that ends after `most_s` seconds, or when it wants to if that is sooner."""
    wanted_s = request.deadline_s
    if most_s is None or (wanted_s is not None and wanted_s <= most_s):
        return request
    return replace(request, deadline_s=most_s)


def check_request(request: GenerationRequest, spec: ModelSpec) -> None:
    """Check what the engine cannot run.

    Raises:
        RequestInvalid: the prompt is empty, does not fit or has an unknown id, or nothing is to be generated.
    """
    tokens = len(request.prompt_ids)
    if not 0 < tokens < spec.max_positions:
        raise RequestInvalid(f"the prompt has {tokens} tokens; the model takes 1 to {spec.max_positions - 1}")
    if request.max_new_tokens < 1:
        raise RequestInvalid(f"max_new_tokens is {request.max_new_tokens}; at least 1 is needed")
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < spec.vocab_size:
        raise RequestInvalid(f"the prompt has a token id outside 0 to {spec.vocab_size - 1}")
