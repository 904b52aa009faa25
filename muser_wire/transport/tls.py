"""Mutual TLS 1.3 on the control port: grpc's credentials, a gate before every method, and what a failure means [9.5].

grpc checks that the other end has the key of a pinned certificate. The gate asks `Security` again at
each call, so that a peer revoked a moment ago gets no further on a connection that it already has.
"""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc

from muser_wire.errors import HandoffRefused, RemoteProtocolError, WireError
from muser_wire.pairing.certificates import TLS_NAME

TLS_VERSION = b"TLSv1.3"
DIAGNOSIS_S = 0.5
"""Bound on finding out why a connection failed, all of it together; a user is waiting."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsMaterial:
    """What one side of a handshake needs, in PEM. Equal material makes equal credentials."""

    key_pem: bytes
    certificate_pem: bytes
    trusted_pem: tuple[bytes, ...]


class Security(Protocol):
    """Whom a port trusts, asked at every use. Methods are called on any thread."""

    def material(self) -> TlsMaterial:
        """Return what the next handshake needs; raises an error of `muser_wire` when no peer may connect."""

    def peer_of(self, certificate_pem: bytes) -> str:
        """Return the fingerprint of the peer that shows a certificate; raises when it is none."""


def server_credentials(security: Security) -> grpc.ServerCredentials:
    """Return credentials that ask `security` anew at each handshake.

    Raises:
        WireError: no peer may connect now.
    """
    latest = security.material()

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal latest
        try:
            latest = security.material()
        except WireError as error:
            # Without a peer left only this node's own certificate is trusted, whose key nobody else has.
            _log.warning("no_peer_may_connect code=%s reason=%s", error.code, error)
            latest = TlsMaterial(latest.key_pem, latest.certificate_pem, (latest.certificate_pem,))
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(_configuration(latest), fetch, require_client_authentication=True)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key_pem, material.certificate_pem)
    return grpc.ssl_server_certificate_configuration([pair], b"".join(material.trusted_pem))


def secure_channel(address: str, material: TlsMaterial, options: list[tuple[str, int]]) -> grpc.Channel:
    """Return a channel that talks to the owner of a trusted certificate only."""
    credentials = grpc.ssl_channel_credentials(
        b"".join(material.trusted_pem), material.key_pem, material.certificate_pem
    )
    return grpc.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", TLS_NAME)])


def calling_peer(security: Security, context: grpc.ServicerContext) -> str:
    """Return the fingerprint of the peer behind a call.

    Raises:
        WireError: the connection is not mutual TLS 1.3, or the peer is not let in now.
    """
    # The stub says bytes; grpc gives every property as a sequence of bytes.
    facts = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
    if list(facts.get("ssl_tls_version", ())) != [TLS_VERSION]:
        raise RemoteProtocolError("the connection is not TLS 1.3")
    certificates = facts.get("x509_pem_cert", ())
    if len(certificates) != 1:
        raise RemoteProtocolError("the connection shows no certificate")
    return security.peer_of(certificates[0])


class PeerGate(grpc.ServerInterceptor):
    """Refuses every call, of whatever method, whose peer is not let in; the log names peer and reason."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        return handler._replace(**{kind: self._gated(method) for kind in kinds if (method := getattr(handler, kind))})

    def _gated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def gated(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                calling_peer(self._security, context)
            except WireError as error:
                _log.warning("peer_refused from=%s code=%s reason=%s", context.peer(), error.code, error)
                context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            return method(request, context)

        return gated


def explain_failure(host: str, port: int, material: TlsMaterial) -> None:
    """Find out why no TLS connection came about, and raise that; return when it was not TLS.

    grpc says "Socket closed" for a certificate that the producer does not take, as for a crash or a cable
    that was out for a moment. So connect without showing a certificate: who answers, and does it answer at
    all? And if it is the right one, connect as before: only a second failure in a row is a refusal.

    Raises:
        HandoffRefused: the port speaks no TLS, another node answers, or it takes no certificate of ours.
    """
    deadline_s = time.monotonic() + DIAGNOSIS_S
    try:
        shown = _shown_certificate(host, port, deadline_s)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        # The connection was cut, or the producer is going down: nothing that a person could act on.
        return
    except ssl.SSLError as error:
        raise HandoffRefused(
            "unpaired", f"{host}:{port} does not speak TLS 1.3: no paired producer serves it"
        ) from error
    except OSError:
        return
    if shown not in {ssl.PEM_cert_to_DER_cert(pem.decode("ascii")) for pem in material.trusted_pem}:
        raise HandoffRefused(
            "unpaired", f"{host}:{port} shows another certificate than the paired producer's; nothing was sent to it"
        )
    if _is_turned_away(target(host, port), material, deadline_s):
        raise HandoffRefused(
            "unpaired",
            f"the producer at {host}:{port} ends connections with this node's certificate: there it is not paired, "
            f"revoked, replaced, or not valid by that machine's clock (see `muser pair list` there)",
        )


def _is_turned_away(address: str, material: TlsMaterial, deadline_s: float) -> bool:
    """Return whether a new connection with this node's certificate fails before the deadline."""
    outcomes: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    # A pool of its own, or grpc would hand over the connection that has just failed, waiting for its next try.
    with secure_channel(address, material, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        channel.subscribe(outcomes.put, try_to_connect=True)
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                outcome = outcomes.get(timeout=left_s)
            except queue.Empty:
                break
            if outcome in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
                return outcome is grpc.ChannelConnectivity.TRANSIENT_FAILURE
    return False


def target(host: str, port: int) -> str:
    """Return a host and port as grpc writes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shown_certificate(host: str, port: int, deadline_s: float) -> bytes:
    """Return the certificate, in DER, that a port shows; it is compared, not trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    # The timeout is for each address of the name, and a name has two at most: IPv6 and IPv4.
    with socket.create_connection((host, port), DIAGNOSIS_S / 2) as plain:
        plain.settimeout(max(0.001, deadline_s - time.monotonic()))
        with context.wrap_socket(plain, server_hostname=TLS_NAME) as secured:
            return secured.getpeercert(binary_form=True) or b""
