"""Who holds a port of this machine: a Muser node, or a stranger. Nothing secret is said to either."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from pathlib import Path

from muser_wire.errors import HandoffRefused, WireError
from muser_wire.messages import decode_description, encode_describe_request, encode_stream_request
from muser_wire.pairing.card import Role
from muser_wire.pairing.credentials import load_credentials
from muser_wire.pairing.trust import producer_trust
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel

CALL_TIMEOUT_S = 5.0
TICKET_OF_NOBODY = bytes(32)
OUR_METRICS = b"muser_handoffs_"
"""What a producer counts from its first moment on, and no other exporter does."""

MAX_READ_NBYTES = 1 << 20

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the name of an address, not a bind
"""Who binds every address answers on this one."""


def is_muser(home: Path, name: str, host: str, port: int) -> bool:
    """Tell whether a Muser node has this port; `name` is what a node's configuration calls it, `host` what it binds."""
    there = WILDCARDS.get(host, host)
    if name == "port":
        return any(_fetched(there, port, "/health", tls=tls) is not None for tls in (False, True))
    if name == "metrics_port":
        return OUR_METRICS in (_fetched(there, port, "/metrics", tls=False) or b"")
    if name == "data_port":
        return _refuses_a_ticket(home, host, port)
    return _describes_itself(there, port) if host in LOOPBACK_HOSTS else _shows_our_certificate(home, there, port)


def _fetched(host: str, port: int, path: str, *, tls: bool) -> bytes | None:
    """Return the start of what a port answers with status 200; None for anything else."""
    connection = http.client.HTTPConnection(host, port, timeout=CALL_TIMEOUT_S)
    if tls:
        context = ssl.create_default_context()
        # The certificate is perhaps a self-signed one for other names; only who answers at all is asked.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=CALL_TIMEOUT_S, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read(MAX_READ_NBYTES) if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _describes_itself(host: str, port: int) -> bool:
    channel = GrpcChannel(host, port)
    try:
        decode_description(channel.describe(encode_describe_request(), CALL_TIMEOUT_S))
    except WireError:
        return False
    finally:
        channel.close()
    return True


def _shows_our_certificate(home: Path, host: str, port: int) -> bool:
    """A paired producer talks to its peers alone, but shows everybody who it is."""
    try:
        shown = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=CALL_TIMEOUT_S))
        own = load_credentials(home, Role.PREFILL)
    except (OSError, ValueError, WireError):
        return False
    return shown in [credential.certificate.der for credential in own.credentials]


def _refuses_a_ticket(home: Path, host: str, port: int) -> bool:
    """The data port is plain and knows tickets alone: one that nobody was given is refused by the wire's own code."""
    try:
        trust = None if host in LOOPBACK_HOSTS else producer_trust(home, host, time.time)
        channel = GrpcChannel(WILDCARDS.get(host, host), port, trust)
        stream = channel.stream_probe(encode_stream_request(TICKET_OF_NOBODY), port)
    except WireError:
        return False
    # A stranger may take the connection and never say anything.
    impatience = threading.Timer(CALL_TIMEOUT_S, stream.cancel)
    impatience.start()
    try:
        list(stream)
    except HandoffRefused:
        return True
    except WireError:
        return False
    finally:
        impatience.cancel()
        channel.close()
    return False
