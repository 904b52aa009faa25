"""POST /v1/responses: the answer as items, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from muser_decode.api.answering import respond, served
from muser_decode.api.body import parse_object
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.responses_request import ResponsesRequest, read_responses_request
from muser_decode.api.responses_writer import ResponsesWriter
from muser_decode.api.shapes import Head


class ResponsesEndpoint:
    """Answers OpenAI's newer API for one backend. Nothing is kept between requests."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    async def answer(self, request: Request) -> Response:
        """Answer one request. A client that goes away cancels its generation.

        Raises:
            ApiError: the request is refused or the generation failed.
        """
        return await served(request, self._kitchen.limits.max_body_nbytes, self._answer)

    async def _answer(self, request: Request, body: bytes) -> Response:
        wanted, prepared = await asyncio.to_thread(self.prepare, body)
        head = Head(prepared.id, int(time.time()), self._kitchen.backend.model_id)
        toolbox = wanted.asked.toolbox
        writer = ResponsesWriter(head, wanted.echoed, self._kitchen.spelling, toolbox.texts)
        return await respond(request, self._kitchen, prepared, writer, stream=wanted.stream, ignored=toolbox.ignored)

    def prepare(self, body: bytes) -> tuple[ResponsesRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Raises:
            ApiError: the request is refused.
        """
        wanted = read_responses_request(parse_object(body))
        return wanted, self._kitchen.conversation(wanted.asked, "resp_", "text.format")
