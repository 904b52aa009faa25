"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as coding agents speak it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.answering import respond, served
from muser_decode.api.body import parse_object
from muser_decode.api.errors import ApiError
from muser_decode.api.messages_request import MessagesRequest, read_messages_request
from muser_decode.api.messages_writer import MessagesWriter
from muser_decode.api.preparing import Kitchen, Prepared

_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, object]:
    """Return Anthropic's error object. The path of the field at fault stands in our messages."""
    ours = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"type": "error", "error": {"type": _KINDS.get(error.status, ours), "message": str(error)}}


def refuse(error: ApiError) -> Response:
    """Return the whole answer of a refusal."""
    return JSONResponse(error_body(error), status_code=error.status, headers=error.headers)


class MessagesEndpoint:
    """Answers Anthropic's API for one backend."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    async def answer(self, request: Request) -> Response:
        """Answer one request. A client that goes away cancels its generation."""
        return await self._guarded(request, self._answer)

    async def count(self, request: Request) -> Response:
        """Say how many tokens a conversation has."""
        return await self._guarded(request, self._count)

    async def _guarded(self, request: Request, answer: Callable[[Request, bytes], Awaitable[Response]]) -> Response:
        try:
            return await served(request, self._kitchen.limits.max_body_nbytes, answer)
        except ApiError as error:
            return refuse(error)

    async def _answer(self, request: Request, body: bytes) -> Response:
        wanted, prepared = await asyncio.to_thread(self.prepare, body)
        writer = MessagesWriter(prepared.id, self._kitchen.backend.model_id, error_body)
        ignored = wanted.asked.toolbox.ignored
        return await respond(
            request, self._kitchen, prepared, writer, stream=wanted.stream, ignored=ignored, refuse=refuse
        )

    def prepare(self, body: bytes) -> tuple[MessagesRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Raises:
            ApiError: the request is refused.
        """
        wanted = read_messages_request(parse_object(body))
        return wanted, self._kitchen.conversation(wanted.asked, "msg_", "output_config.format")

    async def _count(self, _request: Request, body: bytes) -> Response:
        asked = read_messages_request(parse_object(body), counting=True).asked
        prompt = await asyncio.to_thread(self._kitchen.prompt, asked)
        return JSONResponse({"input_tokens": len(prompt.ids)})
