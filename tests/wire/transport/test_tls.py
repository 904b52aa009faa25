"""Mutual TLS on the control port over real gRPC. 127.0.0.2 stands for another machine: it needs pairing as one."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paired_homes import DAY_S, YEAR_S, Homes, own, paired, reissue, trust_card

from muser_wire.errors import HandoffRefused, LocalProtocolError, TransportError, WireError
from muser_wire.pairing.card import Role
from muser_wire.pairing.credentials import rotate, switch
from muser_wire.pairing.errors import ClockError, PeerRefused
from muser_wire.pairing.store import PeerStore
from muser_wire.pairing.trust import Trust, consumer_trust, producer_trust
from muser_wire.transport.base import StreamCall
from muser_wire.transport.grpc import GrpcChannel, GrpcServer
from muser_wire.transport.tls import TlsMaterial, calling_peer, explain_failure, secure_channel

HOST = "127.0.0.2"
TIMEOUT_S = 5.0


class Recorder:
    """A service that remembers who asked; what a refused peer must never reach."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def describe(self, request: bytes) -> bytes:
        self.calls.append("describe")
        return b"described"

    def open(self, request: bytes, peer: str) -> bytes:
        self.calls.append(f"open for {peer}")
        return b"opened"

    def stream(self, request: bytes, call: StreamCall) -> Iterator[bytes]:
        yield b"frame"


class Served:
    """A producer on HOST, and channels of its consumer."""

    def __init__(self, homes: Homes) -> None:
        self.homes = homes
        self.service = Recorder()
        self.server = GrpcServer(HOST, 0, 0, producer_trust(homes.producer, HOST, time.time))
        self.server.start(self.service)
        self._channels: list[GrpcChannel] = []

    def channel(self, home: Path | None = None) -> GrpcChannel:
        trust = consumer_trust(home or self.homes.consumer, HOST, time.time)
        self._channels.append(GrpcChannel(HOST, self.server.control_port, trust))
        return self._channels[-1]

    def stop(self) -> None:
        for channel in self._channels:
            channel.close()
        self.server.stop(0)


@pytest.fixture
def homes(tmp_path: Path) -> Homes:
    return paired(tmp_path)


@pytest.fixture
def served(homes: Homes) -> Iterator[Served]:
    served = Served(homes)
    yield served
    served.stop()


def refused(served: Served, call: Callable[[], object], reason: str, kind: type[WireError] = HandoffRefused) -> None:
    """The call fails for this reason, and nothing of the service was reached."""
    before = list(served.service.calls)
    with pytest.raises(kind, match=reason):
        call()
    assert served.service.calls == before


def test_a_paired_consumer_is_served_and_named_to_the_service(served: Served, homes: Homes) -> None:
    channel = served.channel()
    assert channel.describe(b"", TIMEOUT_S) == b"described"
    assert channel.open(b"", TIMEOUT_S) == b"opened"
    assert list(channel.stream(b"", served.server.data_port)) == [b"frame"]
    assert served.service.calls == ["describe", f"open for {homes.consumer_fingerprint()}"]


def test_on_plain_loopback_the_peer_has_no_name() -> None:
    service = Recorder()
    server = GrpcServer("127.0.0.1", 0, 0)
    server.start(service)
    channel = GrpcChannel("127.0.0.1", server.control_port)
    channel.open(b"", TIMEOUT_S)
    assert service.calls == ["open for "]
    channel.close()
    server.stop(0)


def test_another_loopback_address_needs_pairing_as_another_machine_does() -> None:
    with pytest.raises(LocalProtocolError, match="not a loopback address"):
        GrpcServer(HOST, 0, 0)
    with pytest.raises(LocalProtocolError, match="not a loopback address"):
        GrpcChannel(HOST, 4950)


def test_an_unlisted_peer_is_refused_before_the_service(served: Served, homes: Homes, tmp_path: Path) -> None:
    """A machine that trusts the producer, which has never seen it."""
    unlisted = tmp_path / "unlisted"
    own(unlisted, Role.DECODE)
    trust_card(unlisted, own(homes.producer, Role.PREFILL).card())
    channel = served.channel(unlisted)
    refused(
        served, lambda: channel.describe(b"", TIMEOUT_S), "ends connections with this node's certificate.*not paired"
    )


def test_a_wrong_certificate_of_a_paired_peer_is_refused(served: Served, homes: Homes) -> None:
    reissue(homes.consumer, Role.DECODE, time.time())
    refused(served, lambda: served.channel().open(b"", TIMEOUT_S), "ends connections with this node's certificate")


def test_an_expired_certificate_is_refused_by_tls_and_named_as_a_clock_before_that(homes: Homes) -> None:
    expired = reissue(homes.consumer, Role.DECODE, time.time() - 5.5 * YEAR_S)
    with pytest.raises(ClockError, match=r"this node's certificate expired.*clock"):
        consumer_trust(homes.consumer, HOST, time.time)
    # A consumer whose own clock says otherwise, or that does not look, is stopped by the producer.
    trust_card(homes.producer, expired.card())
    with pytest.raises(ClockError, match=r"decode-box.*expired.*clock"):
        producer_trust(homes.producer, HOST, time.time)


def test_a_consumer_with_a_clock_off_by_a_year_is_stopped_by_the_producer(homes: Homes, tmp_path: Path) -> None:
    """Its certificate begins in the producer's future; by its own clock all is well."""
    late = time.time() + YEAR_S
    ahead = reissue(homes.consumer, Role.DECODE, late)
    trust_card(homes.producer, ahead.card())
    sound = tmp_path / "sound"
    trust_card(homes.producer, own(sound, Role.DECODE).card())
    served = Served(homes)
    channel = GrpcChannel(
        HOST,
        served.server.control_port,
        Trust(homes.consumer, Role.DECODE, lambda: late, only=homes.producer_fingerprint()),
    )
    refused(served, lambda: channel.describe(b"", TIMEOUT_S), r"not valid by that machine's clock")
    channel.close()
    served.stop()


def test_a_peer_revoked_while_connected_is_refused_at_the_next_call(
    served: Served, homes: Homes, caplog: pytest.LogCaptureFixture
) -> None:
    channel = served.channel()
    channel.describe(b"", TIMEOUT_S)
    fingerprint = homes.consumer_fingerprint()
    PeerStore(homes.producer).revoke(fingerprint, time.time())
    with caplog.at_level(logging.WARNING):
        refused(served, lambda: channel.open(b"", TIMEOUT_S), rf"unpaired.*{fingerprint} \(decode-box\) was revoked")
    assert "peer_refused" in caplog.text
    assert fingerprint in caplog.text


def test_a_revoked_peer_cannot_connect_again_although_it_was_the_last(served: Served, homes: Homes) -> None:
    served.channel().describe(b"", TIMEOUT_S)
    PeerStore(homes.producer).revoke(homes.consumer_fingerprint(), time.time())
    refused(served, lambda: served.channel().describe(b"", TIMEOUT_S), "ends connections with this node's certificate")


def test_a_producer_that_the_consumer_revoked_gets_no_call(served: Served, homes: Homes) -> None:
    channel = served.channel()
    channel.describe(b"", TIMEOUT_S)
    PeerStore(homes.consumer).revoke(homes.producer_fingerprint(), time.time())
    refused(served, lambda: channel.open(b"", TIMEOUT_S), r"\(prefill-box\) was revoked", PeerRefused)


def test_a_swapped_server_certificate_is_named_and_nothing_is_sent_to_it(served: Served, homes: Homes) -> None:
    reissue(homes.producer, Role.PREFILL, time.time())
    refused(served, lambda: served.channel().open(b"secret", TIMEOUT_S), "shows another certificate than the paired")


def test_a_plain_port_in_the_producers_place_is_named(homes: Homes, free_port: int) -> None:
    with socket.create_server((HOST, free_port)) as listener:
        listener.settimeout(TIMEOUT_S)

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        channel = GrpcChannel(HOST, free_port, consumer_trust(homes.consumer, HOST, time.time))
        with pytest.raises(WireError, match=r"does not speak TLS|unavailable"):
            channel.describe(b"", TIMEOUT_S)
        channel.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


class Cable:
    """A relay in front of a producer that cuts the first connections, or whichever is open."""

    def __init__(self, port: int, cuts: int) -> None:
        self._to = port
        self._left = cuts
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        while self._open:
            end = self._open.pop()
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._left:
                self._left -= 1
                near.close()
                continue
            far = socket.create_connection((HOST, self._to))
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._carry, args=(one, other)))
                self._threads[-1].start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cable(served: Served) -> Iterator[Callable[[int], Cable]]:
    cables: list[Cable] = []

    def lay(cuts: int) -> Cable:
        cables.append(Cable(served.server.control_port, cuts))
        return cables[-1]

    yield lay
    for one in cables:
        one.close()


def test_a_momentary_cut_is_no_refusal(served: Served, homes: Homes, cable: Callable[[int], Cable]) -> None:
    """The producer would take this node: nobody is told to pair again, and the next call gets through."""
    laid = cable(1)
    channel = GrpcChannel(HOST, laid.port, consumer_trust(homes.consumer, HOST, time.time))
    refused(served, lambda: channel.describe(b"", TIMEOUT_S), "unavailable", TransportError)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not served.service.calls and time.monotonic() < deadline_s:
        with contextlib.suppress(TransportError):
            channel.describe(b"", TIMEOUT_S)
    assert served.service.calls == ["describe"]
    channel.close()


def test_a_cut_in_the_middle_of_a_call_is_no_refusal(
    served: Served, homes: Homes, cable: Callable[[int], Cable], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid = cable(0)
    channel = GrpcChannel(HOST, laid.port, consumer_trust(homes.consumer, HOST, time.time))
    assert channel.describe(b"", TIMEOUT_S) == b"described"

    def cut(request: bytes, peer: str) -> bytes:
        laid.cut()
        return b"never seen"

    monkeypatch.setattr(served.service, "open", cut)
    with pytest.raises(TransportError, match="unavailable"):
        channel.open(b"", TIMEOUT_S)
    channel.close()


def test_behind_a_cable_that_is_cut_a_refusal_is_still_named(
    served: Served, homes: Homes, cable: Callable[[int], Cable]
) -> None:
    laid = cable(0)
    PeerStore(homes.producer).revoke(homes.consumer_fingerprint(), time.time())
    channel = GrpcChannel(HOST, laid.port, consumer_trust(homes.consumer, HOST, time.time))
    refused(served, lambda: channel.describe(b"", TIMEOUT_S), "ends connections with this node's certificate")
    channel.close()


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "silent after a handshake"])
def test_finding_out_why_takes_half_a_second_at_most(homes: Homes, tmp_path: Path, answers: bool) -> None:
    """A port that says nothing, and one that shows the right certificate and then says nothing."""
    credential = own(homes.producer, Role.PREFILL).presented(time.time())
    pem = tmp_path / "producer.pem"
    pem.write_bytes(credential.key_pem + credential.certificate.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["h2"])
    held: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                held.append(context.wrap_socket(plain, server_side=True) if answers else plain)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        material = consumer_trust(homes.consumer, HOST, time.time).material()
        started_s = time.monotonic()
        explain_failure(HOST, listener.getsockname()[1], material)
        took_s = time.monotonic() - started_s
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in held:
        one.close()
    # The bound itself, and what a busy machine needs to wake a thread.
    assert 0.4 < took_s < 0.5 + 0.25


def test_nobody_there_stays_a_transport_error(homes: Homes, free_port: int) -> None:
    channel = GrpcChannel(HOST, free_port, consumer_trust(homes.consumer, HOST, time.time))
    with pytest.raises(TransportError, match="unavailable"):
        channel.describe(b"", TIMEOUT_S)
    channel.close()


def test_every_one_of_several_consumers_is_served_under_its_own_name(
    served: Served, homes: Homes, tmp_path: Path
) -> None:
    """A handshake must find the right pinned certificate among several."""
    others = [tmp_path / name for name in "abc"]
    for other in others:
        trust_card(other, own(homes.producer, Role.PREFILL).card())
        trust_card(homes.producer, own(other, Role.DECODE).card())
    for home in (homes.consumer, *others):
        served.channel(home).open(b"", TIMEOUT_S)
        assert served.service.calls[-1] == f"open for {own(home, Role.DECODE).card().fingerprint}"


def test_a_certificate_signed_with_a_paired_peers_key_is_not_that_peer(
    served: Served, homes: Homes, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC takes a chain that ends in a pinned certificate; the gate takes the pinned certificate itself."""
    credential = own(homes.consumer, Role.DECODE).presented(time.time())
    parent = credential.certificate.x509
    key = ec.generate_private_key(ec.SECP256R1())
    child = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(parent.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(parent.not_valid_before_utc)
        .not_valid_after(parent.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("muser-node")]), critical=True)
        .sign(serialization.load_pem_private_key(credential.key_pem, None), hashes.SHA256())  # type: ignore[arg-type]
    )
    pem = serialization.Encoding.PEM
    material = TlsMaterial(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        child.public_bytes(pem) + credential.certificate.pem,
        (own(homes.producer, Role.PREFILL).presented(time.time()).certificate.pem,),
    )
    with (
        secure_channel(f"{HOST}:{served.server.control_port}", material, []) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/muser.v1.Producer/Open")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE}
    assert served.service.calls == []


def handshake(served: Served, version: ssl.TLSVersion, folder: Path) -> bytes:
    """Return what the producer says first to its paired consumer over this version of TLS."""
    credential = own(served.homes.consumer, Role.DECODE).presented(time.time())
    pem = folder / "consumer.pem"
    pem.write_bytes(credential.key_pem + credential.certificate.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection((HOST, served.server.control_port), TIMEOUT_S)
    with context.wrap_socket(plain, server_hostname="muser-node") as secured:
        return secured.recv(16)


def test_health_and_every_other_method_are_behind_the_gate(served: Served, homes: Homes) -> None:
    material = consumer_trust(homes.consumer, HOST, time.time).material()
    with secure_channel(f"{HOST}:{served.server.control_port}", material, []) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest()
        assert check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.NOT_SERVING
        PeerStore(homes.producer).revoke(homes.consumer_fingerprint(), time.time())
        with pytest.raises(grpc.RpcError) as caught:
            check(request, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_new_peer_is_let_in_without_a_restart(served: Served, homes: Homes, tmp_path: Path) -> None:
    newcomer = tmp_path / "newcomer"
    trust_card(newcomer, own(homes.producer, Role.PREFILL).card())
    trust_card(homes.producer, own(newcomer, Role.DECODE).card())
    assert served.channel(newcomer).describe(b"", TIMEOUT_S) == b"described"


def test_rotation_of_either_node_interrupts_nobody(served: Served, homes: Homes) -> None:
    """Both rotate, exchange cards, and switch; one channel lives through it."""
    channel = served.channel()
    assert channel.describe(b"", TIMEOUT_S) == b"described"
    for home, role, other in (
        (homes.producer, Role.PREFILL, homes.consumer),
        (homes.consumer, Role.DECODE, homes.producer),
    ):
        now_s = time.time()
        rotated = rotate(home, role, now_s)
        assert channel.describe(b"", TIMEOUT_S) == b"described"
        trust_card(other, rotated.card())
        assert channel.describe(b"", TIMEOUT_S) == b"described"
        switched = switch(home, role, now_s)
        assert switched.presented(now_s + DAY_S) == rotated.credentials[1]
        assert channel.describe(b"", TIMEOUT_S) == b"described"
        assert served.channel().describe(b"", TIMEOUT_S) == b"described"


def test_tls_1_2_reaches_no_method(served: Served, tmp_path: Path) -> None:
    """The handshake is grpc's, which would take 1.2; the gate does not."""
    assert handshake(served, ssl.TLSVersion.TLSv1_3, tmp_path)
    trust = producer_trust(served.homes.producer, HOST, time.time)
    pem = own(served.homes.consumer, Role.DECODE).presented(time.time()).certificate.pem

    class Connection:
        def __init__(self, version: bytes) -> None:
            self.version = version

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"ssl_tls_version": [self.version], "x509_pem_cert": [pem]}

    assert calling_peer(trust, Connection(b"TLSv1.3")) == served.homes.consumer_fingerprint()  # type: ignore[arg-type]
    for version in (b"TLSv1.2", b""):
        with pytest.raises(WireError, match=r"not TLS 1\.3"):
            calling_peer(trust, Connection(version))  # type: ignore[arg-type]
