"""A connection that nobody waits on stays well: nothing is left unanswered on it that grpc would take for a dead peer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer

PIECE = bytes(1 << 20)
PINGED_S = 2.5
"""Longer than a ping may go unanswered, and one more second."""


class Lively:
    """Answers, and streams enough for grpc to look at the link's capacity."""

    def describe(self, request: bytes) -> bytes:
        return request * 1000

    def open(self, request: bytes, peer: str) -> bytes:
        return request

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        yield from [PIECE] * 32


@pytest.mark.slow
def test_what_was_idle_is_not_taken_for_dead(capfd: pytest.CaptureFixture[str]) -> None:
    server = GrpcServer("127.0.0.1", 0, 0)
    server.start(Lively())
    channel = GrpcChannel("127.0.0.1", server.control_port)
    try:
        for _ in range(4):
            assert len(channel.describe(b"d", 5.0)) == 1000
            assert sum(map(len, channel.stream(b"s", server.data_port))) == 32 << 20
            time.sleep(PINGED_S)
    finally:
        channel.close()
        server.stop(0)
    assert "goaway" not in capfd.readouterr().err.lower()
