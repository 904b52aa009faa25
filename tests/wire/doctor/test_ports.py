from __future__ import annotations

import http.server
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paired_homes import Homes, paired

from muser_wire.auth import NodeKey
from muser_wire.doctor import ports
from muser_wire.doctor.ports import is_muser
from muser_wire.identities import Digest, Identities
from muser_wire.messages import Description, encode_description
from muser_wire.pairing.certificates import issue
from muser_wire.pairing.trust import producer_trust
from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcServer

DIGEST = Digest(bytes(32))
PAIRED_HOST = "127.0.0.2"


class Described:
    """A producer that can only say what it is."""

    def describe(self, request: bytes) -> bytes:
        identities = Identities(DIGEST, DIGEST, "kv", "native", DIGEST, 64, DIGEST)
        return encode_description(Description(identities, b"{}", bytes(16), bytes(32), 1, 8, ()))

    def open(self, request: bytes, peer: str) -> bytes:
        raise AssertionError("the doctor opens no handoff")

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        raise AssertionError("the doctor opens no handoff")


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return paired(tmp_path)


def test_a_producer_on_this_machine_has_both_its_ports(tmp_path: Path) -> None:
    server = GrpcServer("127.0.0.1", 0, 0)
    server.start(Described())
    try:
        assert is_muser(tmp_path, "control_port", "127.0.0.1", server.control_port)
        assert is_muser(tmp_path, "data_port", "127.0.0.1", server.data_port)
        # Each is known by what only it does.
        assert not is_muser(tmp_path, "control_port", "127.0.0.1", server.data_port)
        assert not is_muser(tmp_path, "port", "127.0.0.1", server.control_port)
    finally:
        server.stop(0)


@pytest.mark.parametrize("bound", [PAIRED_HOST, "0.0.0.0"])
def test_a_paired_producer_is_known_by_its_certificate(bound: str, homes: Homes, tmp_path: Path) -> None:
    server = GrpcServer(bound, 0, 0, producer_trust(homes.producer, bound, time.time))
    server.start(Described())
    try:
        assert is_muser(homes.producer, "control_port", bound, server.control_port)
        assert is_muser(homes.producer, "data_port", bound, server.data_port)
        another = paired(tmp_path / "another")
        assert not is_muser(another.producer, "control_port", bound, server.control_port)
        assert not is_muser(tmp_path / "nobody", "control_port", bound, server.control_port)
        assert not is_muser(tmp_path / "nobody", "data_port", bound, server.data_port)
    finally:
        server.stop(0)


@pytest.mark.parametrize("tls", [False, True])
def test_a_decode_node_is_known_with_tls_and_without(tls: bool, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        if tls:
            made = issue(NodeKey(Ed25519PrivateKey.generate()), time.time())
            (tmp_path / "pem").write_bytes(made.key_pem + made.certificate.pem)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert is_muser(tmp_path, "port", "0.0.0.0", server.server_port)
        server.shutdown()
        thread.join()


def test_a_metrics_port_is_a_producer_s_and_no_other_exporter_s(tmp_path: Path) -> None:
    from muser_prefill.metrics import Metrics, served

    class Exporter(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"node_boot_time_seconds 1.7e9\n")

        def log_message(self, *_: object) -> None:
            pass

    with served("127.0.0.1", 0, Metrics()) as bound:
        assert is_muser(tmp_path, "metrics_port", "0.0.0.0", bound["metrics_port"])
        assert not is_muser(tmp_path, "port", "127.0.0.1", bound["metrics_port"])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert not is_muser(tmp_path, "metrics_port", "127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["port", "control_port", "data_port", "metrics_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", PAIRED_HOST])
def test_a_stranger_that_says_nothing_is_none(
    name: str, host: str, homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "CALL_TIMEOUT_S", 0.3)
    with socket.create_server((host, 0)) as silent:
        assert not is_muser(homes.producer, name, host, silent.getsockname()[1])
