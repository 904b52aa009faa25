"""gRPC: the service `muser.v1.Producer` on a control port and a data port [5.1].

Handlers and calls use identity serialisers, so payload bytes never pass a protobuf parser. grpc's
own errors are mapped here and nowhere else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
import grpc.experimental
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from muser_wire.errors import HandoffRefused, LocalProtocolError, RemoteProtocolError, TransportError, WireError
from muser_wire.framing import MAX_FRAME_NBYTES
from muser_wire.messages import MAX_CONTROL_NBYTES
from muser_wire.transport.base import Service, StreamCall

SERVICE_NAME = "muser.v1.Producer"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
CONTROL_THREADS = 4
DATA_THREADS = 8
"""One thread a stream; the producer's own queue refuses long before."""

MESSAGE_SLACK_NBYTES = 4096

KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]
"""A peer that answers no ping for a second is dead: noticed in 1 to 2 s, a frozen process included."""

_SERVER_OPTIONS: list[tuple[str, int]] = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_CONTROL_NBYTES + MESSAGE_SLACK_NBYTES),
    ("grpc.max_send_message_length", MAX_FRAME_NBYTES + MESSAGE_SLACK_NBYTES),
]
_CONTROL_OPTIONS: list[tuple[str, int]] = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_CONTROL_NBYTES + MESSAGE_SLACK_NBYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_DATA_OPTIONS: list[tuple[str, int]] = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_FRAME_NBYTES + MESSAGE_SLACK_NBYTES),
    # Reads the stream on the caller's thread: measured 1.7 times faster than grpc's own polling thread.
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
]

_log = logging.getLogger(__name__)


class PortTaken(WireError):
    """A port cannot be bound. The message names it and who may hold it."""

    code = "port_taken"


class GrpcServer:
    """Serves a `Service` on two ports of one host, and the standard health service on the control port."""

    def __init__(self, host: str, control_port: int, data_port: int) -> None:
        """Bind both ports, before anything slow is loaded; 0 lets the system choose.

        Raises:
            LocalProtocolError: `host` is not a loopback address; other hosts need paired keys.
            PortTaken: a port is in use.
        """
        if host not in LOOPBACK_HOSTS:
            raise LocalProtocolError(
                f"host {host} is not a loopback address; without paired keys the producer serves this machine only"
            )
        self._health = health.HealthServicer()
        self._control = _server(CONTROL_THREADS)
        self._data = _server(DATA_THREADS)
        self.control_port = _bind(self._control, host, control_port)
        self.data_port = _bind(self._data, host, data_port)

    def start(self, service: Service) -> None:
        """Begin to answer; health says NOT_SERVING until `set_serving`."""
        self._control.add_generic_rpc_handlers((_handlers(_control_methods(service)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._control)
        self._data.add_generic_rpc_handlers((_handlers(_data_methods(service)),))
        self.set_serving(False)
        self._control.start()
        self._data.start()

    def set_serving(self, serving: bool) -> None:
        """Set what the health service answers for the whole server and for the producer's service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            self._health.set(name, status)

    def stop(self, grace_s: float) -> None:
        """Accept nothing new, let streams under way finish for `grace_s` seconds, then end them."""
        for stopped in (self._control.stop(grace_s), self._data.stop(grace_s)):
            stopped.wait()


class _GrpcCall:
    """A `StreamCall` over grpc's context."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `StreamCall`; grpc also calls back after a normal end, which is harmless."""
        if not self._context.add_callback(callback):
            callback()


class GrpcChannel:
    """A consumer's connection to one producer on a loopback address."""

    def __init__(self, host: str, control_port: int) -> None:
        if host not in LOOPBACK_HOSTS:
            raise LocalProtocolError(f"host {host} is not a loopback address; other hosts need paired keys")
        self._host = host
        self._control: Any = grpc.insecure_channel(_address(host, control_port), options=_CONTROL_OPTIONS)
        self._describe: Any = self._control.unary_unary(_method("Describe"))
        self._open: Any = self._control.unary_unary(_method("Open"))
        self._data_lock = threading.Lock()
        self._data: tuple[int, Any] | None = None
        self._is_closed = False

    def describe(self, request: bytes, timeout_s: float) -> bytes:
        """See `Channel`."""
        return _unary(self._describe, request, timeout_s)

    def open(self, request: bytes, timeout_s: float) -> bytes:
        """See `Channel`."""
        return _unary(self._open, request, timeout_s)

    def stream(self, request: bytes, data_port: int) -> GrpcStream:
        """See `Channel`."""
        try:
            return GrpcStream(self._data_channel(data_port).unary_stream(_method("Stream"))(request))
        except ValueError as error:
            raise _closed() from error

    def close(self) -> None:
        """See `Channel`."""
        self._control.close()
        with self._data_lock:
            self._is_closed = True
            if self._data is not None:
                self._data[1].close()
                self._data = None

    def _data_channel(self, port: int) -> Any:
        """Return the channel to the data port, made anew when a restarted producer names another."""
        with self._data_lock:
            if self._is_closed:
                raise _closed()
            if self._data is None or self._data[0] != port:
                if self._data is not None:
                    self._data[1].close()
                self._data = (port, grpc.insecure_channel(_address(self._host, port), options=_DATA_OPTIONS))
            return self._data[1]


class GrpcStream:
    """A `FrameStream` over a grpc call."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[bytes]:
        """Yield frames as grpc delivers them."""
        try:
            yield from self._call
        except grpc.RpcError as error:
            _raise_mapped(error)

    def cancel(self) -> None:
        """See `FrameStream`."""
        self._call.cancel()


def _method(name: str) -> str:
    return f"/{SERVICE_NAME}/{name}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _server(threads: int) -> grpc.Server:
    return grpc.server(futures.ThreadPoolExecutor(threads), options=_SERVER_OPTIONS)


def _bind(server: grpc.Server, host: str, port: int) -> int:
    try:
        return int(server.add_insecure_port(_address(host, port)))
    except RuntimeError as error:
        raise PortTaken(
            f"port {port} on {host} cannot be bound: another process, perhaps a muser-prefill that still runs, "
            f"holds it (see: ss -ltnp 'sport = :{port}')"
        ) from error


def _handlers(methods: dict[str, Any]) -> Any:
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


def _control_methods(service: Service) -> dict[str, Any]:
    def guarded(method: Callable[[bytes], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return method(request)
            except WireError as error:
                return _refuse(error, context)

        return handle

    return {
        "Describe": grpc.unary_unary_rpc_method_handler(guarded(service.describe)),
        "Open": grpc.unary_unary_rpc_method_handler(guarded(service.open)),
    }


def _data_methods(service: Service) -> dict[str, Any]:
    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        call: StreamCall = _GrpcCall(context)
        try:
            yield from service.stream(request, call)
        except WireError as error:
            _refuse(error, context)

    return {"Stream": grpc.unary_stream_rpc_method_handler(stream)}


def _refuse(error: WireError, context: grpc.ServicerContext) -> bytes:
    """End a call that the service refused; what the peer did wrong is told apart from what we did."""
    _log.warning("call_refused code=%s reason=%s", error.code, error)
    blame_peer = isinstance(error, RemoteProtocolError)
    context.abort(grpc.StatusCode.INVALID_ARGUMENT if blame_peer else grpc.StatusCode.INTERNAL, str(error))
    return b""  # never reached: abort raises


def _unary(call: Any, request: bytes, timeout_s: float) -> bytes:
    try:
        return bytes(call(request, timeout=timeout_s))
    except grpc.RpcError as error:
        _raise_mapped(error)
    except ValueError as error:
        raise _closed() from error


def _closed() -> TransportError:
    """Return our error for the ValueError that grpc raises for a call on a closed channel."""
    return TransportError("the channel is closed")


def _raise_mapped(error: grpc.RpcError) -> NoReturn:
    """Raise our error for grpc's: the peer's refusal, or a broken connection."""
    status, details = error.code(), error.details() or "no details"
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        raise HandoffRefused("invalid_request", details) from error
    raise TransportError(f"{status.name.lower()}: {details}") from error
