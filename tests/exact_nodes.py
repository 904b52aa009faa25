"""A real handoff in the reference lane, whole or broken in the middle, digested at the last prompt token."""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from exact_runs import CPU, Digests, Fixture, compiled_operations

from muser_decode.client import Consumer, ProducerClient
from muser_decode.engine.loop import Engine
from muser_decode.engine.request import Event, Failed, Finished, GenerationRequest, Route, RouteReport
from muser_decode.node import DecodeNode, ServedModel
from muser_decode.producers import Producers
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.conform import require_conformance as decode_conformance
from muser_decode.reference.decoder import ReferenceDecoder
from muser_decode.router import RoutePolicy, Router
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.reference.conform import require_conformance as prefill_conformance
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.errors import TransportError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.spec import ModelSpec
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.reference.canonical import Weights
from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer

CHUNK_TOKENS = 512
ANSWER_S = 600.0


class Watched:
    """Of a decoder: its cache and logits are digested when the last prompt token is decoded."""

    spec: ModelSpec
    prompt_tokens: int
    found: Digests | None = None

    def steps(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        logits: mx.array = super().steps(tokens, caches)  # type: ignore[misc]
        if self.found is None and caches[0].length == self.prompt_tokens:
            row = np.array(logits)[0]
            self.found = Digests.of(self.spec, self.prompt_tokens, caches[0].planes, row)
        return logits


class WatchedMlx(Watched, ReferenceDecoder):
    """The decode node's decoder in MLX's operations."""


class WatchedCompiled(Watched, CompiledDecoder):
    """The one by compiled kernels."""


def watched(weights: Weights, prompt_tokens: int, *, compiled: bool) -> WatchedMlx | WatchedCompiled:
    decoder = WatchedCompiled(weights, compiled_operations()) if compiled else WatchedMlx(weights)
    decoder.prompt_tokens = prompt_tokens
    return decoder


class CutService:
    """A producer's service whose stream ends with an error after `frames` frames; None: it does not."""

    def __init__(self, service: ProducerService, frames: int | None) -> None:
        self._service, self._frames = service, frames
        self.describe, self.open = service.describe, service.open

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        for index, frame in enumerate(self._service.stream(request, call)):
            if index == self._frames:
                raise TransportError("unavailable: cut by the test")
            yield frame


@dataclass(frozen=True)
class Handoff:
    """What came of a prompt: digests at its last token, and how it came about."""

    digests: Digests
    report: RouteReport


def broken_handoff(fixture: Fixture, segments: int, *, compiled: bool = False) -> Handoff:
    """Answer a prompt whose handoff of so many segments breaks after three quarters of them."""
    found = handoff(fixture, 1 + segments * 3 // 4, compiled=compiled)
    assert found.report.route is Route.SALVAGED, found.report
    assert found.report.remote_tokens > 0 < found.report.local_tokens, found.report
    return found


def handoff(fixture: Fixture, cut_after: int | None = None, *, compiled: bool = False) -> Handoff:
    """Answer a prompt with a producer in this process, over real sockets; it breaks after `cut_after` frames.

    `compiled`: the decode node has compiled kernels, as on a CPU; else MLX's operations.
    """
    with ExitStack() as stack:
        facts, scheduler = _producer(fixture)
        stack.callback(scheduler.stop, 10.0)
        server = GrpcServer("127.0.0.1", 0, 0)
        service = ProducerService(
            dataclasses.replace(facts, data_port=server.data_port), NodeKey(Ed25519PrivateKey.generate()), scheduler
        )
        server.start(CutService(service, cut_after))
        stack.callback(server.stop, 0)
        return _answer(fixture, GrpcChannel("127.0.0.1", server.control_port), stack, compiled=compiled)


def _identities(fixture: Fixture, conformance: Digest) -> Identities:
    return node_identities(
        open_checkpoint(fixture.path),
        load_tokenizer(fixture.path),
        element=ElementType.F16,
        lane=Lane.REFERENCE,
        chunk_tokens=CHUNK_TOKENS,
        conformance=conformance,
    )


def _producer(fixture: Fixture) -> tuple[ProducerFacts, Scheduler]:
    weights = fixture.weights()
    kernels = choose_exact(weights.spec.head_dim, CPU)
    decoder = TorchReferenceDecoder(weights, device=CPU, kernels=kernels)
    scheduler = Scheduler(decoder, CHUNK_TOKENS, 4)
    scheduler.start()
    facts = ProducerFacts(
        spec=weights.spec,
        identities=_identities(fixture, prefill_conformance(CPU, kernels)),
        geometry=Geometry.of(weights.spec, ElementType.F16),
        kernels=decoder.admitted,
        data_port=1,
        incarnation=os.urandom(16),
    )
    return facts, scheduler


def _answer(fixture: Fixture, channel: GrpcChannel, stack: ExitStack, *, compiled: bool) -> Handoff:
    weights, conformance = fixture.weights(), decode_conformance(compiled_operations() if compiled else None)
    identities, geometry = _identities(fixture, conformance), Geometry.of(weights.spec, ElementType.F16)
    client = ProducerClient(channel, Consumer(weights.spec, identities, geometry))
    stack.callback(client.stop)
    made: list[WatchedMlx | WatchedCompiled] = []

    def decoder() -> WatchedMlx | WatchedCompiled:
        made.append(watched(weights, len(fixture.ids), compiled=compiled))
        return made[0]

    staging_nbytes = geometry.layer_token_nbytes * len(geometry.windows) * CHUNK_TOKENS
    engine = Engine(decoder, chunk_tokens=CHUNK_TOKENS, max_queue=4, staging_nbytes=staging_nbytes)
    model = ServedModel(
        "exact", frozenset(), load_tokenizer(fixture.path), weights.spec.max_positions, created=1, identities=identities
    )
    producers = Producers(Router(RoutePolicy.REMOTE), [client], geometry, CHUNK_TOKENS)
    engine.start()
    stack.callback(engine.stop)
    client.refresh()
    events: queue.Queue[Event] = queue.Queue()
    DecodeNode(model, engine, producers).submit(GenerationRequest("exact", fixture.ids, 1), events.put)
    report = _report(events)
    assert made[0].found is not None, "the prompt's last token was not decoded"
    return Handoff(made[0].found, report)


def _report(events: queue.Queue[Event]) -> RouteReport:
    report: RouteReport | None = None
    while True:
        match events.get(timeout=ANSWER_S):
            case RouteReport() as found:
                report = found
            case Finished():
                assert report is not None
                return report
            case Failed() as failed:
                raise AssertionError(failed)
            case _:
                pass
