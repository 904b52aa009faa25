"""Which names a request may use for this node.

A page in the user's browser can reach a loopback port, and by rebinding its own DNS name even read
the answer. It cannot choose the Host and Origin headers that the browser sends, so requests that name
another host than the operator allows are refused. The address at which a connection arrived is a name too: no DNS
can give it to somebody else.
"""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from muser_decode.api.errors import ApiError

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class HostGuard:
    """Refuses a request whose Host, or Origin where a browser sent one, is not among `allowed` names."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str] = LOOPBACK_NAMES) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] == "http":
            refused = self._refusal(Headers(scope=scope), _arrived_at(scope))
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, own_address: str | None) -> ApiError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._allows(_name(f"//{host}"), own_address):
            return _refuse("Host", host)
        if origin is not None and not self._allows(_name(origin), own_address):
            return _refuse("Origin", origin)
        return None

    def _allows(self, name: str | None, own_address: str | None) -> bool:
        if name is None:
            return False
        return name in self._allowed or (own_address is not None and _address(name) == own_address)


def _arrived_at(scope: Scope) -> str | None:
    """Return the address of this machine that a connection was made to."""
    server = scope.get("server")
    return _address(str(server[0])) if server else None


def _address(text: str) -> str | None:
    """Return an IP address in its one spelling; None for a name. An IPv6 zone is left out: it is one machine's."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _refuse(header: str, value: str) -> ApiError:
    shown = value[:100].encode("ascii", "backslashreplace").decode()
    return ApiError(HTTPStatus.FORBIDDEN, "host_not_allowed", f"the {header} header names {shown!r}, not this node")
