"""Multicast DNS: producers say on the local link that they are there, and `muser pair` lists them.

Nothing connects because of it. What is heard is a stranger's word: it is bounded, made printable, and shown; trust
comes from pairing alone. The package `zeroconf` is optional; without it nobody announces and nobody hears.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from muser_wire.errors import TransportError

HINT = "pip install 'muser[discovery]'"
LOOK_S = 2.0
"""Answers come soon or not at all: RFC 6762 lets a responder wait 120 ms, and asks again after one second."""

RESOLVE_MS = 1500
MAX_SEEN = 64
MAX_NAME_CHARS = 63
FINGERPRINT = re.compile(r"[0-9a-f]{16,64}")


class Kind(Enum):
    """What is announced, by the name of its service type."""

    PRODUCER = "_muser._tcp.local."
    PAIRING = "_muser-pair._tcp.local."


@dataclass(frozen=True)
class Seen:
    """Something that announced itself. `fingerprint` is its own claim, empty for none."""

    kind: Kind
    name: str
    addresses: tuple[str, ...]
    port: int
    fingerprint: str


def available() -> bool:
    """Say whether this environment can announce and hear."""
    return _zeroconf() is not None


@contextlib.contextmanager
def announced(
    kind: Kind, name: str, at: tuple[str, int], fingerprint: str, interfaces: Sequence[str] | None = None
) -> Iterator[None]:
    """Announce a port of this machine while the block runs.

    `at` is the address that it binds, and the port; `interfaces` None: every one.

    Raises:
        TransportError: zeroconf is missing, or the network refuses.
    """
    module = _zeroconf()
    if module is None:
        raise TransportError(f"announcing needs the package zeroconf: {HINT}")
    label = printable(name) or "muser"
    addresses = own_addresses(at[0])
    if interfaces is None and addresses == [at[0]]:
        # What listens on one address is announced there alone.
        interfaces = addresses
    try:
        zeroconf = module.Zeroconf(**_where(interfaces))
        info = module.ServiceInfo(
            kind.value,
            f"{label}.{kind.value}",
            parsed_addresses=addresses,
            port=at[1],
            properties={"fp": fingerprint},
            server=f"{label}.local.",
        )
        zeroconf.register_service(info, allow_name_change=True)
    except (OSError, module.Error) as error:
        raise TransportError(f"announcing failed: {error or type(error).__name__}") from error
    try:
        yield
    finally:
        zeroconf.unregister_service(info)
        zeroconf.close()


def look(seconds: float = LOOK_S, interfaces: Sequence[str] | None = None) -> list[Seen]:
    """Return what announces itself within some seconds, in the order of names; nothing where zeroconf is missing.

    Raises:
        TransportError: the network refuses.
    """
    module = _zeroconf()
    if module is None:
        return []
    heard: dict[str, Kind] = {}

    def on_change(zeroconf: object, service_type: str, name: str, state_change: object) -> None:
        if state_change is module.ServiceStateChange.Added and len(heard) < MAX_SEEN:
            heard[name] = Kind(service_type)

    try:
        zeroconf = module.Zeroconf(**_where(interfaces))
    except (OSError, module.Error) as error:
        raise TransportError(f"listening for announcements failed: {error or type(error).__name__}") from error
    try:
        browser = module.ServiceBrowser(zeroconf, [kind.value for kind in Kind], handlers=[on_change])
        threading.Event().wait(seconds)
        browser.cancel()
        infos = [(kind, name, zeroconf.get_service_info(kind.value, name, RESOLVE_MS)) for name, kind in heard.items()]
    finally:
        zeroconf.close()
    return sorted(
        (read_seen(kind, name, info) for kind, name, info in infos if info is not None),
        key=lambda seen: (seen.kind.value, seen.name),
    )


def read_seen(kind: Kind, name: str, info: Any) -> Seen:
    """Return an announcement as it may be shown: a stranger wrote it."""
    properties: Mapping[bytes, bytes | None] = info.properties
    claimed = (properties.get(b"fp") or b"").decode("ascii", "replace")
    return Seen(
        kind,
        printable(name.removesuffix("." + kind.value)),
        tuple(info.parsed_addresses()),
        info.port or 0,
        claimed if FINGERPRINT.fullmatch(claimed) else "",
    )


def printable(text: str) -> str:
    r"""Return a name without what a terminal, or DNS, would take for more than text.

    >>> printable("gx10\x1b[2J.local")
    'gx10-2J-local'
    """
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:MAX_NAME_CHARS]


def reachable(host: str) -> bool:
    """Say whether another machine could reach what binds `host`."""
    return host != "localhost" and not (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def own_addresses(host: str) -> list[str]:
    """Return the addresses that a node bound to `host` is reached at; of all of this machine's, those of its name."""
    address = ipaddress.ip_address(host) if _is_address(host) else None
    if address is not None and not address.is_unspecified:
        return [host]
    name = socket.gethostname() if address is not None else host
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _where(interfaces: Sequence[str] | None) -> dict[str, Any]:
    return {} if interfaces is None else {"interfaces": list(interfaces)}


def _zeroconf() -> Any:
    try:
        import zeroconf  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    return zeroconf
