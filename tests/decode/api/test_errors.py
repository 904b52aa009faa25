from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muser_decode.api.errors import ApiError, FailureBarrier
from muser_decode.errors import DecodeError


def test_the_body_is_openais_error_object() -> None:
    error = ApiError(503, "overloaded", "busy", headers={"retry-after": "1"})
    assert error.body() == {"error": {"message": "busy", "type": "server_error", "param": None, "code": "overloaded"}}
    assert error.response().headers["retry-after"] == "1"
    assert isinstance(error, DecodeError)


@pytest.mark.parametrize(
    ("method", "url", "status", "reason"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/redoc", 404, "unknown_url"),
        ("GET", "/swagger.json", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_have_the_same_shape(
    kit: Any, method: str, url: str, status: int, reason: str
) -> None:
    response = kit.caller().request(method, url)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, reason, "invalid_request_error")
    assert ("allow" in response.headers) == (status == 405)


def through(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(FailureBarrier(app)(scope, receive, send))
    return sent


def test_the_barrier_answers_for_an_application_that_broke() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("secret")

    start, body = through(app, {"type": "http"})
    assert start["status"] == 500
    assert b"internal_error" in body["body"]
    assert b"secret" not in body["body"]


def test_the_barrier_adds_nothing_to_an_answer_under_way() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("secret")

    assert [message["type"] for message in through(app, {"type": "http"})] == ["http.response.start"]


def test_a_broken_start_of_the_server_is_not_hidden() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("no device")

    with pytest.raises(ValueError, match="no device"):
        through(app, {"type": "lifespan"})
