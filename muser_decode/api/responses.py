"""POST /v1/responses: the answer as items, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.body import parse_object
from muser_decode.api.chat import served
from muser_decode.api.disconnect import unless_gone
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.responses_request import ResponsesRequest, read_responses_request
from muser_decode.api.responses_writer import ResponsesWriter
from muser_decode.api.shapes import Head, route_headers
from muser_decode.api.stream import EventStream


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
        writer = ResponsesWriter(head, wanted.echoed, self._kitchen.spelling)
        if wanted.stream:
            return EventStream(partial(self._kitchen.start, prepared), writer, self._kitchen.limits)
        return await unless_gone(request.receive, self._whole(writer, prepared))

    def prepare(self, body: bytes) -> tuple[ResponsesRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Raises:
            ApiError: the request is refused.
        """
        wanted = read_responses_request(parse_object(body))
        return wanted, self._kitchen.conversation(wanted.asked, "resp_")

    async def _whole(self, writer: ResponsesWriter, prepared: Prepared) -> Response:
        run = self._kitchen.start(prepared)
        try:
            while not run.done:
                index, deltas = await run.advance()
                # The items are the same as a stream's; nobody reads its events.
                for _ in writer.deltas(run, index, deltas):
                    pass
        finally:
            run.cancel()
        run.log_answers()
        for _ in writer.ended(run, 0):
            pass
        return JSONResponse(writer.response(run), headers=route_headers(run.answers[0]))
