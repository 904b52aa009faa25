"""The HTTP port's entrance, opened: its keys, its certificate, the names by which clients may call this node."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from muser_decode.access import AccessConfig
from muser_decode.api.hosts import LOOPBACK_NAMES
from muser_decode.api.keys import ApiKeys
from muser_decode.certificate import Certificate, own_certificate
from muser_wire.transport.grpc import LOOPBACK_HOSTS

WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - told apart here, not bound


@dataclass(frozen=True)
class Entrance:
    """Who may reach a running node. `keys` None: everybody who can connect; `certificate` None: plain HTTP."""

    keys: ApiKeys | None
    certificate: Certificate | None
    names: frozenset[str]


def open_entrance(config: AccessConfig, home: Path, now_s: float) -> Entrance:
    """Read the files that the flags name; `now_s` is in seconds since 1970.

    Raises:
        WireError: a file cannot be used; the message names it.
    """
    keys = None if config.api_key_file is None else ApiKeys(config.api_key_file)
    names = allowed_names(config, socket.gethostname())
    certificate: Certificate | None = None
    if config.tls_cert is not None and config.tls_key is not None:
        certificate = Certificate(config.tls_cert, config.tls_key, now_s)
    elif config.tls_self_signed:
        certificate = own_certificate(home, sorted(names), now_s)
    return Entrance(keys, certificate, names)


def allowed_names(config: AccessConfig, hostname: str) -> frozenset[str]:
    """Return the names by which clients may call this node. Its addresses are known once somebody connects to them."""
    names = LOOPBACK_NAMES | frozenset(config.allowed_hosts)
    if config.host in LOOPBACK_HOSTS:
        return names
    own = hostname.lower()
    named = {config.host.lower()} - WILDCARDS
    return names | named | {own, f"{own.partition('.')[0]}.local"}
