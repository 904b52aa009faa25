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

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the name of an address, not a bind
"""Who binds every address answers on this one."""


def is_muser(home: Path, name: str, host: str, port: int) -> bool:
    """Tell whether a Muser node has this port; `name` is what a node's configuration calls it, `host` what it binds."""
    there = WILDCARDS.get(host, host)
    if name == "port":
        return _answers_http(there, port, tls=False) or _answers_http(there, port, tls=True)
    if name == "data_port":
        return _refuses_a_ticket(home, host, port)
    return _describes_itself(there, port) if host in LOOPBACK_HOSTS else _shows_our_certificate(home, there, port)


def _answers_http(host: str, port: int, *, tls: bool) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=CALL_TIMEOUT_S)
    if tls:
        context = ssl.create_default_context()
        # The certificate is perhaps a self-signed one for other names; only who answers at all is asked.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=CALL_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
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
