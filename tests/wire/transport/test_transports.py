"""Both transports carry the same bytes and the same ends of a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muser_wire.errors import HandoffRefused, LocalProtocolError, RemoteProtocolError, TransportError, WireError
from muser_wire.transport.base import Channel, StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer
from muser_wire.transport.malloc import raise_malloc_thresholds
from muser_wire.transport.memory import MemoryChannel
from muser_wire.transport.ports import PortTaken

TIMEOUT_S = 5.0
FRAMES = 64
"""More than the sockets and grpc buffer, so that a reader that stalls is felt."""


class Echo:
    """Answers with what it was sent; streams frames of 1 MiB, or fails, as the request says."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.frames_made = 0

    def describe(self, request: bytes) -> bytes:
        return b"described " + request

    def open(self, request: bytes, peer: str) -> bytes:
        if request == b"bad":
            raise RemoteProtocolError("field x is absent")
        return request

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        call.on_cancel(self.cancelled.set)
        if request == b"void":
            raise RemoteProtocolError("the ticket is unknown")
        for index in range(FRAMES):
            if request == b"hang" and index == 3:
                self.cancelled.wait(TIMEOUT_S)
                return
            self.frames_made += 1
            yield bytes([index]) * (1 << 20)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, 0)
    server.start(echo)
    yield server
    server.stop(0)


@pytest.fixture(params=["memory", "grpc"])
def channel(request: pytest.FixtureRequest, echo: Echo) -> Iterator[tuple[Channel, int]]:
    if request.param == "memory":
        yield MemoryChannel(echo), 0
        return
    server: GrpcServer = request.getfixturevalue("server")
    channel = GrpcChannel("127.0.0.1", server.control_port)
    yield channel, server.data_port
    channel.close()


def test_calls_carry_bytes_both_ways(channel: tuple[Channel, int]) -> None:
    assert channel[0].describe(b"me", TIMEOUT_S) == b"described me"
    assert channel[0].open(b"\x00\xff", TIMEOUT_S) == b"\x00\xff"


def test_a_stream_carries_megabyte_frames_in_order(channel: tuple[Channel, int]) -> None:
    frames = list(channel[0].stream(b"go", channel[1]))
    assert [(frame[0], len(frame)) for frame in frames] == [(index, 1 << 20) for index in range(FRAMES)]


def test_what_the_service_refuses_is_an_error_here(channel: tuple[Channel, int]) -> None:
    with pytest.raises(WireError, match="field x is absent"):
        channel[0].open(b"bad", TIMEOUT_S)
    with pytest.raises(WireError, match="ticket is unknown"):
        list(channel[0].stream(b"void", channel[1]))


def test_a_cancel_reaches_the_service_and_ends_the_stream(channel: tuple[Channel, int], echo: Echo) -> None:
    stream = channel[0].stream(b"hang", channel[1])
    frames = iter(stream)
    for _ in range(3):
        next(frames)
    threading.Timer(0.1, stream.cancel).start()
    try:
        rest = list(frames)
    except TransportError:
        rest = []
    assert rest == []
    assert echo.cancelled.wait(TIMEOUT_S)


def test_a_closed_channel_is_an_error(channel: tuple[Channel, int]) -> None:
    channel[0].close()
    with pytest.raises(TransportError, match="closed"):
        channel[0].describe(b"me", TIMEOUT_S)
    with pytest.raises(TransportError, match="closed"):
        channel[0].stream(b"go", channel[1])


def test_backpressure_stops_the_producer(channel: tuple[Channel, int], echo: Echo) -> None:
    frames = iter(channel[0].stream(b"go", channel[1]))
    next(frames)
    threading.Event().wait(0.3)
    assert echo.frames_made < FRAMES
    assert len(list(frames)) == FRAMES - 1


def test_grpc_blames_the_side_that_was_wrong(server: GrpcServer) -> None:
    channel = GrpcChannel("127.0.0.1", server.control_port)
    with pytest.raises(HandoffRefused) as caught:
        channel.open(b"bad", TIMEOUT_S)
    assert caught.value.reason == "invalid_request"
    channel.close()


def test_nobody_listening_is_a_transport_error(free_port: int) -> None:
    channel = GrpcChannel("127.0.0.1", free_port)
    with pytest.raises(TransportError, match="unavailable"):
        channel.describe(b"", TIMEOUT_S)
    channel.close()


def test_a_server_that_stops_in_the_middle_breaks_the_stream(server: GrpcServer) -> None:
    channel = GrpcChannel("127.0.0.1", server.control_port)
    frames = iter(channel.stream(b"hang", server.data_port))
    next(frames)
    server.stop(0)
    with pytest.raises(TransportError):
        list(frames)
    channel.close()


def test_a_taken_port_is_named(server: GrpcServer) -> None:
    with pytest.raises(PortTaken, match=f"port {server.control_port} .*muser-prefill.*ss -ltnp"):
        GrpcServer("127.0.0.1", server.control_port, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_other_hosts_than_loopback_are_refused(host: str) -> None:
    with pytest.raises(LocalProtocolError, match="not a loopback address"):
        GrpcServer(host, 0, 0)
    with pytest.raises(LocalProtocolError, match="not a loopback address"):
        GrpcChannel(host, 4950)


def test_the_standard_health_service_follows_the_server(server: GrpcServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.control_port}") as plain:
        check = health_pb2_grpc.HealthStub(plain).Check
        request = health_pb2.HealthCheckRequest(service="muser.v1.Producer")
        assert check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.set_serving(True)
        assert check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING


def test_malloc_thresholds_are_raised_or_left_alone() -> None:
    assert isinstance(raise_malloc_thresholds(), bool)
