"""What only a real server shows: bytes that flow one by one, and clients that go away."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn

from muser_decode.api.limits import Limits
from muser_decode.engine.request import Finished, FinishReason, PrefillProgress, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muser_decode.engine.request import EventSink, GenerationRequest

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
LIMITS = Limits(max_body_nbytes=100_000, header_wait_s=0.2, comment_every_s=0.1)


@pytest.fixture
def url(kit: Any) -> Iterator[str]:
    """The address of a server in front of the scripted backend."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(kit.caller(LIMITS).app, log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert kit.eventually(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    kit.backend.close()
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
    assert not thread.is_alive()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
        yield client


def post_and_leave(url: str, body: bytes, declared: int | None = None) -> socket.socket:
    """Send a request by hand; the caller closes the connection when it likes."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if declared is None else declared}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def until_cancelled(_request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
    sink(PrefillProgress(1, 2))
    cancel.asked.wait(timeout=10)
    sink(Finished(FinishReason.CANCELLED, 0, 0.0, 0.0))


def still_answers(client: httpx.Client, kit: Any) -> bool:
    kit.backend.script = kit.saying("fine")
    response = client.post("/v1/chat/completions", json=BODY)
    return bool(response.json()["choices"][0]["message"]["content"] == "fine")


@pytest.mark.parametrize("flags", [b"", b'"stream": true, '])
def test_a_client_that_leaves_while_the_prompt_is_prefilled_cancels_it(
    kit: Any, url: str, client: httpx.Client, flags: bytes
) -> None:
    kit.backend.script = until_cancelled
    body = b"{" + flags + b'"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'
    connection = post_and_leave(url, body)
    assert kit.eventually(lambda: len(kit.backend.cancels) == 1)
    assert not kit.backend.cancels[0].asked.is_set()
    connection.close()
    assert kit.eventually(kit.backend.cancels[0].asked.is_set)
    assert still_answers(client, kit)


def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_it(kit: Any, client: httpx.Client) -> None:
    def play(_request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        sink(kit.report)
        sink(TokenEvent(ord("a")))
        cancel.asked.wait(timeout=10)

    kit.backend.script = play
    with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        assert any('"content":"a"' in line for line in lines)
        assert not kit.backend.cancels[0].asked.is_set()
    assert kit.eventually(kit.backend.cancels[0].asked.is_set)
    assert still_answers(client, kit)


def test_a_token_is_seen_before_the_next_is_made(kit: Any, client: httpx.Client) -> None:
    seen = threading.Event()
    in_time: list[bool] = []

    def play(_request: GenerationRequest, sink: EventSink, _cancel: Any) -> None:
        sink(kit.report)
        sink(TokenEvent(ord("a")))
        in_time.append(seen.wait(timeout=10))
        sink(TokenEvent(ord("b")))
        sink(Finished(FinishReason.STOP, 2, 0.1, 0.1))

    kit.backend.script = play
    with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        assert response.headers["x-muser-route"] == "remote"
        lines = response.iter_lines()
        assert any('"content":"a"' in line for line in lines)
        seen.set()
        assert "data: [DONE]" in list(lines)
    assert in_time == [True]


def test_progress_is_seen_while_the_prompt_is_prefilled(kit: Any, client: httpx.Client) -> None:
    kit.backend.script = until_cancelled
    with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        assert response.status_code == 200
        assert "x-muser-route" not in response.headers
        assert any(line == ": prefilling 1/2" for line in response.iter_lines())


def test_a_client_that_leaves_before_its_body_is_complete_does_no_harm(
    kit: Any, url: str, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    connection = post_and_leave(url, b'{"model"', declared=1000)
    connection.close()
    assert still_answers(client, kit)
    assert len(kit.backend.requests) == 1
    assert "ERROR" not in caplog.text


def test_a_body_over_the_limit_is_refused_before_it_is_sent(kit: Any, url: str, client: httpx.Client) -> None:
    connection = post_and_leave(url, b"", declared=10**9)
    assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    connection.close()
    assert still_answers(client, kit)


def test_two_answers_at_once(kit: Any, client: httpx.Client, url: str) -> None:
    both = threading.Barrier(2, timeout=10)

    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        both.wait()
        kit.saying("together")(request, sink, cancel)

    kit.backend.script = play
    texts: list[str] = []

    def ask() -> None:
        response = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=10, trust_env=False)
        texts.append(response.json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["together"] * 2
