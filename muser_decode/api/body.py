"""From a request's bytes to one JSON object, read strictly."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

from starlette.requests import Request

from muser_decode.api.errors import ApiError, invalid
from muser_decode.api.limits import MAX_DEPTH


async def read_body(request: Request, limit_nbytes: int) -> bytes:
    """Return the body of a JSON request, read no further than `limit_nbytes`.

    Raises:
        ApiError: 415 for another type or encoding, 413 for a body over the limit.
        ClientDisconnect: the client went away in the middle.
    """
    _check_media_type(request)
    declared = request.headers.get("content-length", "0")
    # A server checks the header's digits before it gets here; the count below holds in any case.
    if declared.isdecimal() and int(declared) > limit_nbytes:
        raise _too_large(limit_nbytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_nbytes:
            raise _too_large(limit_nbytes)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object that `body` holds. Of a repeated key the last value counts.

    Refused beside malformed JSON: NaN and infinities in any spelling, bytes that are not UTF-8,
    lone surrogates in any string, nesting beyond what the parser bears.

    Raises:
        ApiError: 400.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from error
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _malformed("a string holds a lone surrogate") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at character {error.pos}") from error
    except _NotJson as error:
        raise _malformed(str(error)) from error
    except ValueError as error:
        # Python's own bound on the digits of an integer.
        raise _malformed("a number is out of range") from error
    if not isinstance(value, dict):
        raise _malformed("it is not an object")
    if deeper_than(value, MAX_DEPTH):
        raise _malformed("it is nested too deeply")
    return value


def deeper_than(value: object, levels: int) -> bool:
    """Say whether arrays and objects stand within one another on more than so many levels."""
    inner: list[object] = [value]
    for _ in range(levels + 1):
        inner = [
            item
            for one in inner
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
        if not inner:
            return False
    return True


def _check_media_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", "The body must not be compressed.")
    declared = request.headers.get("content-type")
    if declared is None:
        return
    media_type = declared.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        message = f"Content-Type must be application/json, not {media_type!r}."
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def _too_large(limit_nbytes: int) -> ApiError:
    message = f"The body is larger than {limit_nbytes} bytes."
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", message)


def _malformed(why: str) -> ApiError:
    return invalid(None, f"The body is not a JSON object that can be used: {why}.", "invalid_json")


class _NotJson(ValueError):
    """Something that Python's parser takes and the JSON standard does not."""


def _no_constant(literal: str) -> float:
    raise _NotJson(f"{literal} is not JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise _NotJson("a number is out of range")
    return value
