from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from muser_decode.api.hosts import HostGuard


def status(headers: dict[str, str], url: str = "http://127.0.0.1:4949") -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        transport = httpx.ASGITransport(HostGuard(PlainTextResponse("reached")))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            response = await client.get("/v1/models", headers=headers)
            return response.status_code, response.text

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4949", "http://localhost", "http://LOCALHOST:1", "http://[::1]:4949"]
)
def test_loopback_names_are_served(url: str) -> None:
    assert status({}, url) == (200, "reached")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4949", "127.0.0.1.evil.example", "", "[", "10.0.0.1"])
def test_another_host_is_refused_with_an_error_object(host: str) -> None:
    code, text = status({"host": host})
    assert code == 403
    assert '"code":"host_not_allowed"' in text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example", "http://["])
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert status({"origin": origin})[0] == 403


@pytest.mark.parametrize("origin", ["http://localhost:4949", "http://127.0.0.1:3000"])
def test_a_page_of_this_machine_is_served(origin: str) -> None:
    assert status({"origin": origin})[0] == 200
