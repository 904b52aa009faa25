"""Work that ends when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. The request's body must have been read to its end.

    Raises:
        ClientDisconnect: the client went first; `work` was cancelled and has ended.
    """
    watcher = asyncio.create_task(_gone(receive))
    worker = asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
