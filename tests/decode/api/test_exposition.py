from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from muser_decode.api.errors import ApiError
from muser_decode.api.exposition import MetricsEndpoint


def test_the_text_is_given_out_as_prometheus_reads_it() -> None:
    asked: list[threading.Thread] = []

    def exposition() -> bytes:
        asked.append(threading.current_thread())
        return b"muser_x 1\n"

    response = asyncio.run(MetricsEndpoint(exposition).answer())
    assert response.body == b"muser_x 1\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    # What it asks for may take a lock: not on the event loop.
    assert asked != [threading.main_thread()]


def test_an_application_that_counts_nothing_says_so(kit: Any) -> None:
    with pytest.raises(ApiError):
        asyncio.run(MetricsEndpoint(None).answer())
    response = kit.caller().request("GET", "/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
