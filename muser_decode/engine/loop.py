"""The engine: one thread owns mlx and serves every active generation in turn.

mlx evaluates on one thread only, so decoder, caches and staging buffers are made on the engine's thread
and never leave it. Other threads hand in requests and cancellations, and fill staging memory; events go
out through each request's sink, called on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.generation import Generation
from muser_decode.engine.prefilling import Workshop
from muser_decode.engine.recording import Recording
from muser_decode.engine.request import EventSink, FinishReason, GenerationRequest
from muser_decode.engine.source import KVSource
from muser_decode.engine.staging import Staging
from muser_decode.errors import DecodeError, EngineBusy, EngineStopped, RequestInvalid
from muser_decode.keeper import Keeper
from muser_wire.model.spec import ModelSpec

log = logging.getLogger(__name__)

MAX_ACTIVE = 4
"""Generations served in turn: each holds a whole cache, and each makes the others slower."""

IDLE_S = 1.0
"""How long the thread sleeps at most when there is nothing to do, in seconds: its heartbeat."""

STALL_S = 120.0
"""No heartbeat for so long means a stuck engine. The longest unit, 2,048 tokens of local prefill, takes some 10 s."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. `max_queue` counts generations that wait beside the MAX_ACTIVE that run."""

    chunk_tokens: int
    max_queue: int
    staging_nbytes: int
    staging_slots: int = 2


class Engine:
    """Runs generations on a decoder that `decoder_factory` makes on the engine's own thread."""

    def __init__(
        self,
        decoder_factory: Callable[[], MlxDecoder],
        *,
        chunk_tokens: int,
        max_queue: int,
        staging_nbytes: int,
        staging_slots: int = 2,
        keeper: Keeper | None = None,
    ) -> None:
        self._factory = decoder_factory
        self._keeper = keeper
        self._config = EngineConfig(chunk_tokens, max_queue, staging_nbytes, staging_slots)
        self._thread = threading.Thread(target=self._run, name="muser-engine", daemon=True)
        self._lock = threading.Lock()
        self._waiting: deque[Generation] = deque()
        self._active: list[Generation] = []
        self._unfinished = 0
        self._accepting = False
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._loaded = threading.Event()
        self._load_error: BaseException | None = None
        self._spec: ModelSpec | None = None
        self.last_progress = time.monotonic()
        """Monotonic time, in seconds, at which the thread last finished a unit or found nothing to do."""

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

        Returns False when the thread is still in a unit after STALL_S more; it dies with the process.
        """
        with self._lock:
            self._accepting = False
        deadline = time.monotonic() + drain_s
        while self._thread.is_alive() and self._unfinished and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(STALL_S)
        return not self._thread.is_alive()

    def submit(
        self, request: GenerationRequest, sink: EventSink, source: KVSource | None = None, reason: str = ""
    ) -> Generation:
        """Accept a request; its events go to `sink`, the last one is Finished or Failed.

        `source` brings the prompt's cache. Without one, `reason` says why, for the RouteReport. When this
        raises, the source was not touched.

        Raises:
            RequestInvalid: the prompt is empty or leaves no position for an answer.
            EngineBusy: too many requests wait.
            EngineStopped: the engine does not run.
        """
        generation = Generation(request, sink, source, reason, self._woken.set)
        with self._lock:
            if not self._accepting or self._spec is None:
                raise EngineStopped("the engine does not take requests")
            check_request(request, self._spec)
            if self._unfinished >= MAX_ACTIVE + self._config.max_queue:
                raise EngineBusy(f"{self._unfinished} requests are running or waiting")
            self._unfinished += 1
            self._waiting.append(generation)
        self._woken.set()
        return generation

    def wake(self) -> None:
        """Have the thread look for news at once. Callable from any thread."""
        self._woken.set()

    def healthy(self) -> bool:
        """Say whether the engine takes requests and its thread makes progress."""
        return self._accepting and self._thread.is_alive() and time.monotonic() - self.last_progress < STALL_S

    @property
    def load(self) -> int:
        """Requests accepted and not yet ended."""
        return self._unfinished

    # On the engine's thread

    def _run(self) -> None:
        """Load, serve until told to stop, end what is left."""
        try:
            workshop = self._load()
        except Exception as error:  # outermost: `start` raises it on the caller's thread
            self._load_error = error
            self._loaded.set()
            return
        self._loaded.set()
        try:
            while not self._stopping.is_set():
                self._turn(workshop)
        except Exception:  # outermost loop of the engine's thread
            log.exception("engine_failed")
        finally:
            workshop.staging.pool.close()
            self._end_all()

    def _load(self) -> Workshop:
        decoder = self._factory()
        config = self._config
        staging = Staging(decoder.geometry, config.staging_slots, config.staging_nbytes, self.wake)
        self._spec, self._accepting = decoder.spec, True
        self.last_progress = time.monotonic()
        recording = None
        if self._keeper is not None:
            recording = Recording(self._keeper, decoder.geometry, config.chunk_tokens)
        return Workshop(decoder, staging, config.chunk_tokens, recording)

    def _turn(self, workshop: Workshop) -> None:
        """Admit what fits, give each active generation one unit, sleep if none had anything to do."""
        self._woken.clear()
        self._admit(workshop)
        progressed = False
        for generation in list(self._active):
            progressed |= self._guarded(generation, generation.advance)
            self.last_progress = time.monotonic()
        self._active = [generation for generation in self._active if not generation.ended]
        if workshop.recording is not None:
            progressed |= workshop.recording.advance()
        if not progressed:
            self._woken.wait(IDLE_S)
        self.last_progress = time.monotonic()

    def _admit(self, workshop: Workshop) -> None:
        with self._lock:
            gone = [generation for generation in self._waiting if generation.cancelled]
            self._waiting = deque(generation for generation in self._waiting if not generation.cancelled)
            room = MAX_ACTIVE - len(self._active)
            admitted = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        for generation in gone:
            self._guarded(generation, partial(generation.finish, FinishReason.CANCELLED))
        for generation in admitted:
            self._guarded(generation, partial(generation.admit, workshop))
        self._active += [generation for generation in admitted if not generation.ended]

    def _guarded(self, generation: Generation, unit: Callable[[], bool | None]) -> bool:
        """Run a unit; an error in it ends this generation alone. Returns whether anything was done."""
        try:
            done = unit()
        except Exception as error:  # outermost loop of one generation: the others go on
            log.exception("generation_failed request=%s", generation.request.request_id)
            self._fail(generation, error)
            done = True
        if generation.ended:
            with self._lock:
                self._unfinished -= 1
        return done is not False

    def _fail(self, generation: Generation, error: Exception) -> None:
        shown = str(error) if isinstance(error, DecodeError) else type(error).__name__
        try:
            generation.fail(f"the engine failed on this request: {shown}")
        except Exception:  # outermost: a sink that fails must not end the engine
            log.exception("sink_failed request=%s", generation.request.request_id)

    def _end_all(self) -> None:
        """Cancel everything that has not ended."""
        with self._lock:
            self._accepting = False
            left = [*self._active, *self._waiting]
            self._active, self._waiting = [], deque()
        for generation in left:
            if not generation.ended:
                self._guarded(generation, partial(generation.finish, FinishReason.CANCELLED))


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
