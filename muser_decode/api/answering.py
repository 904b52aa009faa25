"""What every endpoint that generates has in common: read a body, then stream an answer or give it whole."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.body import read_body
from muser_decode.api.disconnect import unless_gone
from muser_decode.api.errors import ApiError
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.run import Run
from muser_decode.api.shapes import route_headers
from muser_decode.api.stream import EventStream, Writer
from muser_decode.formats.conversation import Delta

IGNORED_HEADER = "x-muser-ignored-tools"

log = logging.getLogger(__name__)


class WholeWriter(Writer, Protocol):
    """Writes an answer in the shape of one endpoint, streamed or whole."""

    async def whole(self, run: Run) -> Mapping[str, object]:
        """Return the whole answer as JSON values.

        Raises:
            ApiError: a generation failed.
        """


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


async def respond(
    request: Request,
    kitchen: Kitchen,
    prepared: Prepared,
    writer: WholeWriter,
    *,
    stream: bool,
    ignored: Sequence[str] = (),
    refuse: Callable[[ApiError], Response] = ApiError.response,
) -> Response:
    """Return the answer to a request that was understood. A client that goes away cancels its generations.

    `ignored` are the types of offered tools that the model was not told of, which a header names.

    Raises:
        ApiError: the engine did not take it, or a generation failed.
        ClientDisconnect: the client went away.
    """
    if stream:
        response: Response = EventStream(partial(kitchen.start, prepared), writer, kitchen.limits, refuse)
    else:
        response = await unless_gone(request.receive, _whole(kitchen, prepared, writer))
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(dict.fromkeys(ignored))
    return response


async def _whole(kitchen: Kitchen, prepared: Prepared, writer: WholeWriter) -> Response:
    run = kitchen.start(prepared)
    body = await writer.whole(run)
    return JSONResponse(body, headers=route_headers(run.answers[0]))


async def unstreamed(run: Run, writer: Writer) -> None:
    """Have a stream's writer take a whole run. What it collects is the same; nobody reads its events.

    Raises:
        ApiError: a generation failed.
    """

    def take(index: int, deltas: Sequence[Delta]) -> None:
        deque(writer.deltas(run, index, deltas), maxlen=0)

    await run.drain(take)
    deque(writer.ended(run, 0), maxlen=0)
