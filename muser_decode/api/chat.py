"""POST /v1/chat/completions: from bytes to submitted generations, and the answer in one piece or streamed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.body import parse_object, read_body
from muser_decode.api.disconnect import unless_gone
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.schemas import ChatRequest, read_chat_request
from muser_decode.api.shapes import ChatWriter, Head, completion, gather, route_headers
from muser_decode.api.stream import EventStream

log = logging.getLogger(__name__)


class ChatEndpoint:
    """Answers chats for one backend."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    async def answer(self, request: Request) -> Response:
        """Answer one request. A client that goes away cancels its generations.

        Raises:
            ApiError: the request is refused or a generation failed.
        """
        return await served(request, self._kitchen.limits.max_body_nbytes, self._answer)

    async def _answer(self, request: Request, body: bytes) -> Response:
        # A long prompt takes a second to parse and tokenize; other answers go on meanwhile.
        chat, prepared = await asyncio.to_thread(self.prepare, body)
        head = Head(prepared.id, int(time.time()), self._kitchen.backend.model_id)
        if chat.stream:
            writer = ChatWriter(head, self._kitchen.spelling, include_usage=chat.include_usage, progress=chat.progress)
            return EventStream(partial(self._kitchen.start, prepared), writer, self._kitchen.limits)
        return await unless_gone(request.receive, self._whole(head, prepared))

    def prepare(self, body: bytes) -> tuple[ChatRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Prompt and answer share the context: an answer that reaches its end finishes with `length`,
        also where `max_tokens` would allow more.

        Raises:
            ApiError: the request is refused.
        """
        chat = read_chat_request(parse_object(body))
        return chat, self._kitchen.conversation(chat.asked, "chatcmpl-")

    async def _whole(self, head: Head, prepared: Prepared) -> Response:
        run = self._kitchen.start(prepared)
        gathered = await gather(run)
        body = completion(head, run, gathered, self._kitchen.spelling)
        return JSONResponse(body, headers=route_headers(run.answers[0]))


async def served(
    request: Request, limit_nbytes: int, answer: Callable[[Request, bytes], Awaitable[Response]]
) -> Response:
    """Read a request's body and answer it; nobody reads the answer to a client that went away.

    Raises:
        ApiError: the request is refused or failed.
    """
    try:
        return await answer(request, await read_body(request, limit_nbytes))
    except ClientDisconnect:
        log.info("client_gone")
        return Response(status_code=HTTPStatus.NO_CONTENT)
