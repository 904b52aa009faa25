"""API keys: who may use the endpoints when they are not for this machine alone.

The file of keys is private and has one key a line; blank lines and those that begin with # count for nothing. A
client sends one as `Authorization: Bearer KEY`, or as `x-api-key: KEY` where it speaks Anthropic's API.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from muser_decode.api import messages
from muser_decode.api.errors import ApiError
from muser_wire.private_files import KeyFileError, read_private

MAX_FILE_NBYTES = 64 * 1024
MIN_KEY_CHARS = 20
"""A key that somebody made up is shorter; 20 random letters and digits have over 100 bits."""

MAX_KEY_CHARS = 256
HOW = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"

OPEN_PATHS = frozenset({"/health", "/", "/docs", "/openapi.json"})
"""What is served without a key: that the process lives, and pages that hold nothing of this node."""

MESSAGES_PATH = "/v1/messages"

_log = logging.getLogger(__name__)


class ApiKeys:
    """The keys of a file, as digests: their text is not kept. Methods may be called on any thread."""

    def __init__(self, path: Path) -> None:
        """Read the keys.

        Raises:
            KeyFileError: others can read the file, it is empty, or a line is no key.
        """
        self._path = path
        self._digests = _read(path)

    def reload(self) -> None:
        """Read the file again; when it cannot be used the keys stay as they were.

        Raises:
            KeyFileError: as at the start.
        """
        self._digests = _read(self._path)

    def admit(self, presented: str) -> bool:
        """Say whether this is one of the keys, in a time that does not tell which, or how much of it is right."""
        digest = _digest(presented)
        # Every key is looked at, whatever an earlier one gave.
        return sum(hmac.compare_digest(digest, own) for own in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path) -> tuple[bytes, ...]:
    text = read_private(path, MAX_FILE_NBYTES).decode("ascii", "replace")
    digests: list[bytes] = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        # The message must not show what may be half a key.
        if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not all("!" <= char <= "~" for char in key):
            raise KeyFileError(
                f"{path}:{number}: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters, no space"
            )
        digests.append(_digest(key))
    if not digests:
        raise KeyFileError(f"{path} has no key; make one with: {HOW}")
    return tuple(digests)


class KeyGuard:
    """Refuses requests without one of the keys, except for what is open to everybody."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            presented = _presented(Headers(scope=scope))
            if presented is None or not self._keys.admit(presented):
                await _refuse(scope, given=presented is not None)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _presented(headers: Headers) -> str | None:
    """Return the key that a request shows, if any."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key")


def _refuse(scope: Scope, *, given: bool) -> Response:
    client = scope.get("client") or ("unknown", 0)
    _log.warning("key_refused from=%s given=%s", client[0], given)
    what = "The API key is not one of this node's" if given else "An API key is needed: Authorization: Bearer KEY"
    error = ApiError(HTTPStatus.UNAUTHORIZED, "invalid_api_key", what, headers={"www-authenticate": "Bearer"})
    speaks_anthropic = scope["path"].startswith(MESSAGES_PATH)
    return messages.refuse(error) if speaks_anthropic else error.response()
