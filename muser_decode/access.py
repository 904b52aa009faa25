"""The flags that say who may reach the HTTP port and how it is kept from listeners on the network.

On a loopback address nothing is needed. On another one a key is, and TLS unless the operator says that the way is
safe without: both are checked before the port is bound.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from muser_wire.errors import WireError
from muser_wire.transport.grpc import LOOPBACK_HOSTS


class AccessError(WireError):
    """The flags of the HTTP port do not fit together, or leave it open. The message names them."""

    code = "access"


@dataclass(frozen=True)
class AccessConfig:
    """The flags. `allowed_hosts` are further names by which clients may call this node."""

    host: str
    api_key_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_self_signed: bool
    http_plaintext: bool
    allowed_hosts: tuple[str, ...]

    @property
    def has_tls(self) -> bool:
        """Whether the port speaks TLS."""
        return self.tls_cert is not None or self.tls_self_signed


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the flags of the HTTP port's access."""
    group.add_argument(
        "--api-key-file", type=Path, help="private file of API keys, one a line; needed where --host is not loopback"
    )
    group.add_argument("--tls-cert", type=Path, help="certificate of the HTTP port, with its chain, in PEM")
    group.add_argument("--tls-key", type=Path, help="private file of its key, in PEM")
    group.add_argument(
        "--tls-self-signed",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="make a certificate for the HTTP port and keep it",
    )
    group.add_argument(
        "--http-plaintext",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow HTTP without TLS where --host is not loopback",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name by which clients may call this node; may be given several times",
    )


def from_arguments(arguments: argparse.Namespace) -> AccessConfig:
    """Return the flags, checked against one another; no file is looked at.

    Raises:
        AccessError: they do not fit together, or would leave the port open to others.
    """
    access = AccessConfig(
        host=arguments.host,
        api_key_file=arguments.api_key_file,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        tls_self_signed=arguments.tls_self_signed,
        http_plaintext=arguments.http_plaintext,
        allowed_hosts=tuple(name.lower() for name in arguments.allowed_host),
    )
    if (access.tls_cert is None) != (access.tls_key is None):
        raise AccessError("--tls-cert and --tls-key belong together")
    if access.tls_cert is not None and access.tls_self_signed:
        raise AccessError("--tls-self-signed makes a certificate; --tls-cert names one: give one of them")
    if access.has_tls and access.http_plaintext:
        raise AccessError("--http-plaintext says no TLS, and another flag wants it")
    if access.host not in LOOPBACK_HOSTS:
        _check_open(access)
    return access


def _check_open(access: AccessConfig) -> None:
    what = f"--host {access.host} is not a loopback address"
    if access.api_key_file is None:
        raise AccessError(f"{what}: it needs --api-key-file, a private file with one key a line")
    if not access.has_tls and not access.http_plaintext:
        raise AccessError(
            f"{what}: it needs TLS, by --tls-cert and --tls-key or by --tls-self-signed; where the network is safe "
            f"without, --http-plaintext says so"
        )
