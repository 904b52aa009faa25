from __future__ import annotations

import errno
import os
import socket

import pytest

from muser_decode.serve import bind
from muser_prefill.metrics import Metrics, MetricsServer
from muser_wire.transport.grpc import GrpcServer
from muser_wire.transport.ports import PortTaken, port_taken


def test_a_port_that_another_process_holds_is_told_with_what_shows_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        for make in (lambda: GrpcServer("127.0.0.1", port, 0), lambda: bind("127.0.0.1", port)):
            with pytest.raises(PortTaken, match=rf"port {port} .*another process, .*sport = :{port}'.*lsof -i :{port}"):
                make()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a..b"])
def test_an_address_that_this_machine_does_not_have_is_no_other_process_s_fault(host: str) -> None:
    for make in (lambda: bind(host, 0), lambda: MetricsServer(host, 0, Metrics())):
        with pytest.raises(PortTaken, match=f"port 0 on {host} cannot be bound: this machine does not have that"):
            make()
    # grpc says only that it failed.
    assert "this machine does not have that address" in str(port_taken("x", host, 0, RuntimeError("failed")))


def test_anything_else_is_told_in_the_system_s_words() -> None:
    refused = OSError(errno.EACCES, os.strerror(errno.EACCES))
    assert str(port_taken("x", "::1", 80, refused)) == "port 80 on ::1 cannot be bound: Permission denied"
