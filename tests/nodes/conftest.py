"""Both nodes on a tiny model in one process, joined in memory or over gRPC; faults are put on the streams."""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from muser_decode.client import Consumer, ProducerClient
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    RouteReport,
    TokenEvent,
)
from muser_decode.node import DecodeNode, ServedModel
from muser_decode.producers import Producers
from muser_decode.router import RoutePolicy, Router
from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Identities
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.transport.base import Channel, StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer
from muser_wire.transport.memory import MemoryChannel

CHUNK_TOKENS = 64
ANSWER_S = 60.0
PROMPT = tuple(5 + (index * 37) % 200 for index in range(200))
"""Four chunks of the grid, the last one short."""

Fault = Callable[[Iterator[bytes]], Iterator[bytes]]


def identities_of(path: Path, chunk_tokens: int = CHUNK_TOKENS) -> Identities:
    return node_identities(
        open_checkpoint(path),
        load_tokenizer(path),
        element=ElementType.F16,
        lane=Lane.NATIVE,
        chunk_tokens=chunk_tokens,
    )


@dataclass
class Producer:
    """A real producer without sockets."""

    service: ProducerService
    scheduler: Scheduler


def start_producer(path: Path, chunk_tokens: int = CHUNK_TOKENS, max_waiting: int = 4) -> Producer:
    checkpoint = open_checkpoint(path)
    decoder = TorchDecoder(checkpoint, dtype=torch.float32, kv_element=ElementType.F16, device=torch.device("cpu"))
    scheduler = Scheduler(decoder, chunk_tokens, max_waiting)
    scheduler.start()
    facts = ProducerFacts(
        spec=checkpoint.spec,
        identities=identities_of(path, chunk_tokens),
        geometry=Geometry.of(checkpoint.spec, ElementType.F16),
        kernels=decoder.admitted,
        data_port=1,
        incarnation=os.urandom(16),
    )
    return Producer(ProducerService(facts, NodeKey(Ed25519PrivateKey.generate()), scheduler), scheduler)


class FaultyService:
    """A producer's service whose next stream passes through `fault` before the transport takes it.

    `request` is the last one opened, as the consumer sent it.
    """

    def __init__(self, service: ProducerService) -> None:
        self.inner = service
        self.fault: Fault | None = None
        self.request = b""

    def describe(self, request: bytes) -> bytes:
        return self.inner.describe(request)

    def open(self, request: bytes, peer: str) -> bytes:
        self.request = request
        return self.inner.open(request, peer)

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        frames = self.inner.stream(request, call)
        fault, self.fault = self.fault, None
        return frames if fault is None else fault(frames)


@dataclass
class Answer:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    report: RouteReport | None = None
    last: Finished | Failed | None = None


@dataclass
class Pair:
    """A decode node and its producer."""

    node: DecodeNode
    engine: Engine
    client: ProducerClient
    service: FaultyService
    producer: Producer
    server: GrpcServer | None = None

    def use(self, client: ProducerClient) -> None:
        """Let the node reach its producer by another client."""
        self.client = client
        self.node._producers._clients = {client.name: client}

    def stop(self) -> None:
        assert self.engine.stop()
        self.client.stop()
        if self.server is not None:
            self.server.stop(0)

    def ask(self, prompt: tuple[int, ...] = PROMPT, tokens: int = 12, fault: Fault | None = None) -> Answer:
        """Answer one prompt greedily; `fault` alters its handoff."""
        self.service.fault = fault
        events: queue.Queue[Event] = queue.Queue()
        self.node.submit(GenerationRequest("test", prompt, tokens), events.put)
        return collect(events)

    def collect(self, events: queue.Queue[Event]) -> Answer:
        """Read one generation's events to its end."""
        return collect(events)


def collect(events: queue.Queue[Event]) -> Answer:
    answer = Answer()
    while answer.last is None:
        match events.get(timeout=ANSWER_S):
            case TokenEvent(token):
                answer.tokens.append(token)
            case RouteReport() as report:
                answer.report = report
            case Finished() | Failed() as last:
                answer.last = last
            case _:
                pass
    return answer


def start_pair(path: Path, producer: Producer, transport: str = "memory") -> Pair:
    checkpoint = open_checkpoint(path)
    identities = identities_of(path)
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    service = FaultyService(producer.service)
    server: GrpcServer | None = None
    channel: Channel = MemoryChannel(service)
    if transport == "grpc":
        server = GrpcServer("127.0.0.1", 0, 0)
        facts = dataclasses.replace(producer.service._facts, data_port=server.data_port)
        service.inner = ProducerService(facts, producer.service._node_key, producer.scheduler)
        server.start(service)
        channel = GrpcChannel("127.0.0.1", server.control_port)
    client = ProducerClient(channel, Consumer(checkpoint.spec, identities, geometry))
    engine = Engine(
        lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
        chunk_tokens=CHUNK_TOKENS,
        max_queue=8,
        staging_nbytes=geometry.layer_token_nbytes * len(geometry.windows) * CHUNK_TOKENS,
    )
    model = ServedModel(
        "tiny", frozenset(), load_tokenizer(path), checkpoint.spec.max_positions, created=1, identities=identities
    )
    node = DecodeNode(model, engine, Producers(Router(RoutePolicy.REMOTE), [client], geometry, CHUNK_TOKENS))
    engine.start()
    client.refresh()
    return Pair(node, engine, client, service, producer, server)


@pytest.fixture(scope="module")
def producer(tiny_llama: Path) -> Iterator[Producer]:
    """A producer of the tiny model."""
    producer = start_producer(tiny_llama)
    yield producer
    producer.scheduler.stop(10.0)


@pytest.fixture(scope="module", params=["memory", "grpc"])
def pair(request: pytest.FixtureRequest, tiny_llama: Path, producer: Producer) -> Iterator[Pair]:
    """Both nodes of the tiny model, joined in memory and again over real gRPC."""
    pair = start_pair(tiny_llama, producer, request.param)
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def local_answer(tiny_llama: Path) -> Answer:
    """The prompt's answer from a node that has no producer: what every other way must equal."""
    checkpoint = open_checkpoint(tiny_llama)
    engine = Engine(
        lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
        chunk_tokens=CHUNK_TOKENS,
        max_queue=1,
        staging_nbytes=2,
    )
    engine.start()
    events: queue.Queue[Event] = queue.Queue()
    engine.submit(GenerationRequest("alone", PROMPT, 12), events.put)
    answer = collect(events)
    assert engine.stop()
    assert len(set(answer.tokens)) > 1, "an answer of one token would prove little"
    return answer


StartPair = Callable[..., Pair]
StartProducer = Callable[..., Producer]


@pytest.fixture
def started() -> Iterator[tuple[StartPair, StartProducer]]:
    """Functions that start further nodes; what they started is stopped."""
    pairs: list[Pair] = []
    producers: list[Producer] = []

    def new_pair(path: Path, producer: Producer, transport: str = "memory") -> Pair:
        pairs.append(start_pair(path, producer, transport))
        return pairs[-1]

    def new_producer(path: Path, chunk_tokens: int = CHUNK_TOKENS, max_waiting: int = 4) -> Producer:
        producers.append(start_producer(path, chunk_tokens, max_waiting))
        return producers[-1]

    yield new_pair, new_producer
    for pair in pairs:
        pair.stop()
    for producer in producers:
        producer.scheduler.stop(10.0)
