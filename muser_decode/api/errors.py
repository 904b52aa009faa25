"""Refusals in the shape of OpenAI's error object."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muser_decode.api.limits import RETRY_AFTER_S
from muser_decode.errors import DecodeError, EngineBusy, EngineStopped, RequestInvalid

log = logging.getLogger(__name__)

BAD_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(DecodeError):
    """An answer other than 200. `param` is the path of the field at fault, such as `messages[2].content`."""

    code = "api"

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object. Its `code` is our `reason`."""
        kind = BAD_REQUEST if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else SERVER_ERROR
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.reason}}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def invalid(param: str | None, message: str, reason: str = "invalid_value") -> ApiError:
    """Return the refusal of a request whose sender is at fault."""
    return ApiError(HTTPStatus.BAD_REQUEST, reason, message, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """Return the refusal of a parameter that would have to be ignored to go on."""
    return invalid(param, message, "unsupported_parameter")


def internal() -> ApiError:
    """Return the refusal for a fault of ours. What happened stands in the log."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "The server failed to answer this request.")


def from_engine(error: EngineBusy | EngineStopped | RequestInvalid) -> ApiError:
    """Return the answer to a request that the engine did not take."""
    if isinstance(error, RequestInvalid):
        return invalid(None, str(error))
    retry = {"retry-after": str(RETRY_AFTER_S)}
    reason = "overloaded" if isinstance(error, EngineBusy) else "stopping"
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, reason, str(error) or reason, headers=retry)


def deadline_exceeded() -> ApiError:
    """Return the answer to a request whose deadline came before its first token.

    OpenAI's clients would ask again at once, with the same deadline; they heed this header.
    """
    message = "The deadline came before the first token of the answer."
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, "deadline_exceeded", message, headers={"x-should-retry": "false"})


async def answer_api_error(_request: Request, error: Exception) -> Response:
    """Answer an `ApiError` that an endpoint raised."""
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer what the web framework refuses by itself: an unknown path, a wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    reasons: dict[int, str] = {HTTPStatus.NOT_FOUND: "unknown_url", HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed"}
    reason = reasons.get(error.status_code, "http_error")
    message = f"{error.detail}: {request.method} {request.url.path}"
    return ApiError(error.status_code, reason, message, headers=error.headers).response()


def log_failure(error: Exception) -> None:
    """Log an exception that nothing expected: its type and place. Its text may quote a prompt and stays out."""
    log.error("request_failed error=%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


class FailureBarrier:
    """The outermost loop of a request: whatever escapes becomes a 500 without details, and the node goes on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        # The outermost loop of a request.
        except Exception as error:
            log_failure(error)
            if scope["type"] != "http":
                raise
            if not started:
                await internal().response()(scope, receive, send)
