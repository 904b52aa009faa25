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


def arriving_at(address: str, headers: dict[str, str], names: frozenset[str] = frozenset({"mac.local"})) -> int:
    """Ask over a connection that was made to `address`; return the status."""
    sent: list[dict[str, object]] = []

    async def ask() -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": (address, 4949),
        }

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        guard = HostGuard(PlainTextResponse("reached"), names)
        await guard(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    return int(str(sent[0]["status"]))


@pytest.mark.parametrize(
    ("address", "host"),
    [("192.168.1.5", "192.168.1.5:4949"), ("fd00::5", "[fd00:0:0::5]:4949"), ("fe80::1%en0", "[fe80::1]")],
)
def test_the_address_that_a_client_reached_is_a_name(address: str, host: str) -> None:
    assert arriving_at(address, {"host": host}) == 200
    assert arriving_at(address, {"host": host, "origin": f"http://{host}"}) == 200
    assert arriving_at(address, {"host": "MAC.local", "origin": f"https://{host}"}) == 200


@pytest.mark.parametrize("host", ["192.168.1.6", "evil.example", "192.168.1.5.evil.example", "localhost"])
def test_another_address_or_a_name_that_was_not_allowed_is_none(host: str) -> None:
    assert arriving_at("192.168.1.5", {"host": host}) == 403
    assert arriving_at("192.168.1.5", {"host": "192.168.1.5", "origin": f"http://{host}"}) == 403
