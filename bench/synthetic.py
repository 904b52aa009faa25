"""A producer without a model: planes from memory stand where a decoder's would, all else is the product's own.

Both processes of a benchmark build the same memory from the same seed, so the reader can check what it received.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.driver import BenchError
from muser_wire.geometry import ElementType, Geometry, kv_layout
from muser_wire.identities import Digest, Identities
from muser_wire.model.spec import LayerSpec, ModelSpec
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, MAX_PROMPT_TOKENS
from muser_wire.trace import now_ns

MEMORY_NBYTES = 128 << 20
"""What planes are read from: larger than any cache, so that reading costs what it costs in a real prefill."""

VOCABULARY = 1024
SEED = 7
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """The part of a model that matters here. The default is 52 layers of 2 KV heads of 128: 53,248 bytes a token."""

    layers: int = 52
    kv_heads: int = 2
    head_dim: int = 128
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    @property
    def spec(self) -> ModelSpec:
        """A spec with this geometry; its other numbers mean nothing."""
        return ModelSpec(
            family="synthetic",
            layers=(LayerSpec(window=None, rope=None),) * self.layers,
            hidden_size=self.kv_heads * self.head_dim,
            ffn_size=1,
            heads=self.kv_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=VOCABULARY,
            max_positions=MAX_PROMPT_TOKENS,
            norm_eps=1e-5,
            tied_embeddings=True,
            attention_scale=1.0,
        )

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.spec, ElementType.F16)

    @property
    def identities(self) -> Identities:
        """What both sides claim to be."""
        return Identities(
            spec_digest=self.spec.digest(),
            tokenizer_digest=Digest(bytes(32)),
            kv_layout=kv_layout(ElementType.F16),
            lane="native",
            numerics_digest=Digest(bytes(32)),
            chunk_tokens=self.chunk_tokens,
            weights_digest=Digest(bytes(32)),
        )

    @property
    def token_nbytes(self) -> int:
        return self.layers * self.geometry.layer_token_nbytes

    def prompt_tokens(self, nbytes: int) -> int:
        """Return the prompt whose handoff carries about `nbytes`; its last token is held back."""
        return max(1, round(nbytes / self.token_nbytes)) + 1


class PlaneMemory:
    """Where planes come from: a pure function of layer, range and seed."""

    def __init__(self, shape: Shape, nbytes: int = MEMORY_NBYTES) -> None:
        self._row = (shape.kv_heads, shape.head_dim)
        rows = nbytes // (2 * shape.kv_heads * shape.head_dim)
        bits = np.random.default_rng(SEED).integers(0, 1 << 16, rows * shape.kv_heads * shape.head_dim, dtype=np.uint16)
        self._rows: npt.NDArray[np.float16] = bits.view(np.float16).reshape(rows, *self._row)

    def plane(self, layer: int, is_value: bool, start: int, stop: int) -> npt.NDArray[np.float16]:
        """Return `[stop - start, kv_heads, head_dim]`, a view; neighbouring ranges are neighbours in memory."""
        span = len(self._rows) - DEFAULT_CHUNK_TOKENS
        first = (start + (2 * layer + is_value) * DEFAULT_CHUNK_TOKENS) % span
        return self._rows[first : first + stop - start]


class MemoryCache:
    """Planes that are there before anything was computed."""

    def __init__(self, memory: PlaneMemory) -> None:
        self._memory = memory
        self.length = 0

    def planes(self, layer: int, start: int, stop: int) -> tuple[object, object]:
        """See `muser_prefill.export.PlaneSource`."""
        import torch

        keys, values = (torch.from_numpy(self._memory.plane(layer, kind, start, stop)) for kind in (False, True))
        return keys, values


class MemoryDecoder:
    """Stands where `TorchDecoder` does: it sleeps `chunk_s` seconds for each whole chunk, in equal parts a layer."""

    def __init__(self, shape: Shape, memory: PlaneMemory) -> None:
        self.spec = shape.spec
        self.chunk_s = 0.0
        self._shape = shape
        self._memory = memory

    def new_cache(self, capacity: int) -> MemoryCache:
        return MemoryCache(self._memory)

    def prefill_chunk(self, token_ids: Sequence[int], cache: MemoryCache, on_layer: Callable[[int], None]) -> None:
        layer_s = self.chunk_s / self._shape.layers * len(token_ids) / self._shape.chunk_tokens
        due_s = time.perf_counter()
        for layer in range(self._shape.layers):
            # Sleeps add up: one that took too long shortens the next; a wait for room does not.
            due_s = max(due_s, time.perf_counter() - layer_s) + layer_s
            if layer_s:
                time.sleep(max(0.0, due_s - time.perf_counter()))
            on_layer(layer)
        cache.length += len(token_ids)


class Source:
    """A whole producer over `PlaneMemory`, listening on loopback."""

    def __init__(self, shape: Shape, max_rate: float = 0.0, decoder: MemoryDecoder | None = None) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from muser_prefill.engine.scheduler import Scheduler
        from muser_prefill.service import ProducerFacts, ProducerService
        from muser_wire.auth import NodeKey
        from muser_wire.transport.grpc import GrpcServer
        from muser_wire.transport.malloc import raise_malloc_thresholds

        logging.basicConfig(level=logging.WARNING)
        raise_malloc_thresholds()
        self.decoder = decoder or MemoryDecoder(shape, PlaneMemory(shape))
        self.server = GrpcServer(HOST, 0, 0)
        facts = ProducerFacts(
            spec=shape.spec,
            identities=shape.identities,
            geometry=shape.geometry,
            kernels=(),
            data_port=self.server.data_port,
            incarnation=os.urandom(16),
        )
        self._scheduler = Scheduler(self.decoder, shape.chunk_tokens, max_waiting=1)
        self._scheduler.start()
        node_key = NodeKey(Ed25519PrivateKey.generate())
        self.server.start(ProducerService(facts, node_key, self._scheduler, max_rate=max_rate))

    def close(self) -> None:
        self.server.stop(0)
        self._scheduler.stop(5.0)


class Sink:
    """A consumer without an engine: the product's client and ingest, into memory that was made before."""

    SLOTS = 2

    def __init__(self, shape: Shape, control_port: int) -> None:
        from muser_decode.client import Consumer, ProducerClient
        from muser_decode.engine.source import SlotPool, StagingSlot
        from muser_wire.transport.grpc import GrpcChannel
        from muser_wire.transport.malloc import raise_malloc_thresholds

        logging.basicConfig(level=logging.WARNING)
        raise_malloc_thresholds()
        self._shape = shape
        chunk_nbytes = shape.token_nbytes * shape.chunk_tokens
        # Written once, so that no page is faulted in while the clock runs.
        self.slots = [memoryview(np.full(chunk_nbytes, 1, np.uint8)) for _ in range(self.SLOTS)]
        self._news = threading.Event()
        self.pool = SlotPool((StagingSlot(i, memory) for i, memory in enumerate(self.slots)), self._wake)
        self.news_ns = 0
        self._client = ProducerClient(
            GrpcChannel(HOST, control_port), Consumer(shape.spec, shape.identities, shape.geometry)
        )
        self._client.refresh()

    def close(self) -> None:
        self._client.stop()

    def _wake(self) -> None:
        """Note when something was posted, on the ingest's thread: after a handoff, when its seal had been verified."""
        self.news_ns = now_ns()
        self._news.set()

    def handoff(self, prompt_tokens: int, commit: Callable[[object], None]) -> int:
        """Run one handoff to its verified seal; return its payload in bytes. `commit` gets each whole chunk."""
        from muser_decode.engine.source import SourceDone, StagedChunk
        from muser_decode.ingest import RemoteSource

        source = RemoteSource(self._client, [index % VOCABULARY for index in range(prompt_tokens)])
        source.begin(self.pool)
        while True:
            self._news.wait()
            self._news.clear()
            while (item := source.poll()) is not None:
                if isinstance(item, StagedChunk):
                    commit(item)
                    self.pool.release(item.slot)
                elif isinstance(item, SourceDone):
                    return item.payload_nbytes
                else:
                    raise BenchError(item.reason)
