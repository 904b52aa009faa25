"""GET /metrics: what this node has counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from muser_decode.api.errors import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsEndpoint:
    """`exposition` returns the text; None: this application counts nothing."""

    def __init__(self, exposition: Callable[[], bytes] | None) -> None:
        self._exposition = exposition

    async def answer(self) -> Response:
        """Return the metrics.

        Raises:
            ApiError: 404, there are none.
        """
        if self._exposition is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "unknown_url", "This server has no metrics.")
        # Not on the event loop: some of it is read from the system and under locks.
        return Response(await run_in_threadpool(self._exposition), headers={"content-type": CONTENT_TYPE})
