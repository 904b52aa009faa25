"""A connection that nobody waits on stays well: nothing is left unanswered on it that grpc would take for a dead peer.

The server is a process of its own: in one process its threads would read the channel's connections too.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from muser_wire.transport.grpc import GrpcChannel

IDLE_S = 2.5
"""Longer than a ping may go unanswered, and one more second."""

SERVER = """
import sys
from muser_wire.transport.grpc import GrpcServer

class Lively:
    def describe(self, request):
        return request * 100_000
    def open(self, request, peer):
        return request
    def stream(self, request, call):
        yield from [bytes(1 << 20)] * 32

server = GrpcServer("127.0.0.1", 0, 0)
server.start(Lively())
print(server.control_port, server.data_port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_was_idle_is_not_taken_for_dead() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        control_port, data_port = map(int, server.stdout.readline().split())
        channel = GrpcChannel("127.0.0.1", control_port)
        for _ in range(4):
            assert len(channel.describe(b"d", 5.0)) == 100_000
            assert sum(map(len, channel.stream(b"s", data_port))) == 32 << 20
            time.sleep(IDLE_S)
        channel.close()
        _, said = server.communicate("", timeout=30)
    assert "goaway" not in said.lower()
