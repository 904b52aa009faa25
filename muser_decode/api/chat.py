"""POST /v1/chat/completions: from bytes to submitted generations, and the answer in one piece or streamed."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from muser_decode.api.answering import respond, served
from muser_decode.api.body import parse_object
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.schemas import ChatRequest, read_chat_request
from muser_decode.api.shapes import ChatWriter, Head


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
        writer = ChatWriter(head, self._kitchen.spelling, include_usage=chat.include_usage, progress=chat.progress)
        return await respond(request, self._kitchen, prepared, writer, stream=chat.stream)

    def prepare(self, body: bytes) -> tuple[ChatRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Prompt and answer share the context: an answer that reaches its end finishes with `length`,
        also where `max_tokens` would allow more.

        Raises:
            ApiError: the request is refused.
        """
        chat = read_chat_request(parse_object(body))
        return chat, self._kitchen.conversation(chat.asked, "chatcmpl-")
