from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from muser_wire.errors import TransportError
from muser_wire.pairing.exchange import MAX_MESSAGE_NBYTES
from muser_wire.transport import pairing
from muser_wire.transport.pairing import PairingLink, PairingPort, call

HOST = "127.0.0.2"


@pytest.fixture
def port() -> Iterator[PairingPort]:
    port = PairingPort(HOST, 0)
    yield port
    port.close()


@pytest.fixture
def raw(port: PairingPort) -> Iterator[tuple[socket.socket, PairingLink]]:
    """A caller that may send anything, and the listener's end."""
    with socket.create_connection((HOST, port.port)) as caller, port.accept(5.0) as link:
        yield caller, link


def test_messages_arrive_whole_and_in_order(port: PairingPort) -> None:
    with call(HOST, port.port) as caller, port.accept(5.0) as listener:
        for message in (b"1", b"", b"2" * MAX_MESSAGE_NBYTES):
            caller.send(message)
        assert [listener.receive(), listener.receive()] == [b"1", b"2" * MAX_MESSAGE_NBYTES]
        listener.send(b"back")
        assert caller.receive() == b"back"
        assert caller.peer_host == HOST


@pytest.mark.parametrize("size", [0, MAX_MESSAGE_NBYTES + 1, 2**32 - 1])
def test_a_size_out_of_bounds_is_refused_before_anything_is_read(
    raw: tuple[socket.socket, PairingLink], size: int
) -> None:
    raw[0].sendall(size.to_bytes(4, "big"))
    with pytest.raises(TransportError, match=f"announces {size} bytes"):
        raw[1].receive()


def test_a_message_cut_short_is_no_message(raw: tuple[socket.socket, PairingLink]) -> None:
    raw[0].sendall((5).to_bytes(4, "big") + b"four")
    raw[0].shutdown(socket.SHUT_WR)
    with pytest.raises(TransportError, match="closed the connection"):
        raw[1].receive()


def test_a_caller_that_drips_bytes_is_dropped_in_time(raw: tuple[socket.socket, PairingLink]) -> None:
    def drip() -> None:
        for _ in range(8):
            raw[0].sendall(b"\x00")
            time.sleep(0.1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"nothing in time|broke"):
        raw[1].receive(timeout_s=0.25)
    assert time.monotonic() - started < 2.0
    dripping.join()


def test_nobody_there_is_named_on_both_ends(port: PairingPort, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="nobody called within"):
        port.accept(0.05)
    port.close()
    monkeypatch.setattr(pairing, "CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(TransportError, match=r"does not answer .*muser pair listen"):
        call(HOST, port.port)


def test_a_taken_port_is_named(port: PairingPort) -> None:
    with pytest.raises(TransportError, match=f"port {port.port} on {HOST} cannot be bound"):
        PairingPort(HOST, port.port)
