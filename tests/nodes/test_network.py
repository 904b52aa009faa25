"""The cable between the nodes is cut or goes silent, at each stage: the answer stays, and the time is bounded."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tcp_proxy import TcpProxy

import muser_decode.engine.cache
import muser_prefill.engine.cache
from muser_decode.client import ProducerState
from muser_decode.engine.request import Route
from muser_wire.transport.grpc import GrpcChannel

DEAD_S = 2.0
"""A dead or silent peer is known within this, plus what the answer itself takes on a slow machine."""

SLACK_S = 3.0
SEGMENT_NBYTES = 64 * 6 * 2 * 2 * 16 * 2
STAGES = {"begin": 30, "first_segment": 400, "second_segment": SEGMENT_NBYTES + 1000, "last": 3 * SEGMENT_NBYTES + 2000}
"""Bytes that still come from the data port before the fault."""


@dataclasses.dataclass
class Cabled:
    """Both nodes over gRPC through two proxies."""

    pair: Any
    control: TcpProxy
    data: TcpProxy


@pytest.fixture
def cabled(tiny_llama: Path, producer: Any, started: Any) -> Iterator[Cabled]:
    new_pair, _ = started
    pair = new_pair(tiny_llama, producer, "grpc")
    data = TcpProxy(pair.server.data_port)
    control = TcpProxy(pair.server.control_port)
    service = pair.service.inner
    service._facts = dataclasses.replace(service._facts, data_port=data.port)
    pair.client._channel.close()
    pair.client._channel = GrpcChannel("127.0.0.1", control.port)
    pair.client.refresh()
    assert pair.ask().report.route is Route.REMOTE
    yield Cabled(pair, control, data)
    data.close()
    control.close()


def held(pair: Any) -> tuple[int, int, int]:
    """What both nodes hold for requests: their load, and the threads that take handoffs in."""
    ingests = [thread for thread in threading.enumerate() if thread.name.startswith("ingest")]
    return pair.producer.scheduler.load, pair.engine.load, len(ingests)


def caches() -> Counter[type]:
    """Caches of both nodes that something still refers to."""
    gc.collect()
    kinds = (muser_decode.engine.cache.KVCache, muser_prefill.engine.cache.KVCache)
    return Counter(kind for kind in map(type, gc.get_objects()) if kind in kinds)


def check_all_came_back(pair: Any, before: Counter[type]) -> None:
    deadline = time.monotonic() + 10.0
    while (held(pair), caches()) != ((0, 0, 0), before):
        assert time.monotonic() < deadline, (held(pair), caches(), before)
        time.sleep(0.05)


@pytest.mark.parametrize("then", ["cut", "freeze"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_data_connection_fails(cabled: Cabled, local_answer: Any, stage: str, then: str) -> None:
    before = caches()
    cabled.data.arm(STAGES[stage], then)
    begun = time.monotonic()
    answer = cabled.pair.ask()
    waited = time.monotonic() - begun
    assert answer.tokens == local_answer.tokens
    assert answer.report.route in (Route.LOCAL, Route.SALVAGED)
    assert answer.report.reason
    assert waited < DEAD_S + SLACK_S
    cabled.data.repair()
    deadline = time.monotonic() + 10.0
    while cabled.pair.ask().report.route is not Route.REMOTE:
        assert time.monotonic() < deadline, "the next requests never went the remote way again"
    check_all_came_back(cabled.pair, before)


@pytest.mark.parametrize("then", ["cut", "freeze"])
def test_the_control_connection_fails(cabled: Cabled, local_answer: Any, then: str) -> None:
    before = caches()
    cabled.control.arm(0, then)
    begun = time.monotonic()
    answer = cabled.pair.ask()
    assert answer.tokens == local_answer.tokens
    assert answer.report.route is Route.LOCAL
    assert time.monotonic() - begun < DEAD_S + SLACK_S
    assert cabled.pair.client.refresh().state is ProducerState.UNREACHABLE
    cabled.control.repair()
    deadline = time.monotonic() + 10.0
    while cabled.pair.client.refresh().state is not ProducerState.READY:
        assert time.monotonic() < deadline, "the producer was never seen again"
    assert cabled.pair.ask().report.route is Route.REMOTE
    check_all_came_back(cabled.pair, before)


def test_a_producer_that_misses_a_keepalive_and_lives_stays_ready(
    cabled: Cabled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that is too busy for a second or two: the connection is given up, the next one works."""
    channel, tries = cabled.pair.client._channel, []
    describe = channel.describe

    def with_a_silence(request: bytes, timeout_s: float, *, wait: bool = False) -> bytes:
        tries.append(wait)
        if wait:
            cabled.control.repair()
        return bytes(describe(request, timeout_s, wait=wait))

    monkeypatch.setattr(channel, "describe", with_a_silence)
    cabled.control.arm(0, "freeze")
    assert cabled.pair.client.refresh().state is ProducerState.READY
    assert tries == [False, True]
    assert "unreachable" not in caplog.text
    assert cabled.pair.ask().report.route is Route.REMOTE
