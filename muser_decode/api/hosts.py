"""Which names a request may use for this node.

A page in the user's browser can reach a loopback port, and by rebinding its own DNS name even read
the answer. It cannot choose the Host and Origin headers that the browser sends, so requests that name
another host than the operator allows are refused.
"""

from __future__ import annotations

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
            refused = self._refusal(Headers(scope=scope))
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if _name(f"//{host}") not in self._allowed:
            return _refuse("Host", host)
        origin = headers.get("origin")
        if origin is not None and _name(origin) not in self._allowed:
            return _refuse("Origin", origin)
        return None


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _refuse(header: str, value: str) -> ApiError:
    shown = value[:100].encode("ascii", "backslashreplace").decode()
    return ApiError(HTTPStatus.FORBIDDEN, "host_not_allowed", f"the {header} header names {shown!r}, not this node")
