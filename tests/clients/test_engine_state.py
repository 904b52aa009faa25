"""What clients and monitors see of an engine that is stuck, out of time, or full."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest
from local_backend import LocalBackend, local_backend, served

from muser_decode.decoder import MlxDecoder
from muser_decode.engine import loop
from muser_decode.engine.cache import KVCache

WAIT_S = 30.0
CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 0}


class Gate:
    """Lets steps pass, or holds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        whole = MlxDecoder.steps

        def steps(decoder: MlxDecoder, tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
            assert self.open.wait(WAIT_S)
            return whole(decoder, tokens, caches)

        monkeypatch.setattr(MlxDecoder, "steps", steps)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    # An idle engine must have a heartbeat well within the bound.
    monkeypatch.setattr(loop, "IDLE_S", 0.05)
    return Gate(monkeypatch)


@pytest.fixture
def node(tiny_llama: Path, gate: Gate) -> Iterator[tuple[LocalBackend, httpx.Client]]:
    sizes = {"max_queue": 1, "max_batch": 1, "stall_s": 1.0}
    with local_backend(tiny_llama, **sizes) as backend, served(backend) as url:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            yield backend, client
        gate.open.set()


class Counted:
    """Counts the generations that a backend is asked for."""

    def __init__(self, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        whole = backend.engine.submit_all

        def submit_all(parts: Any) -> Any:
            self.asked += len(parts)
            return whole(parts)

        monkeypatch.setattr(backend.engine, "submit_all", submit_all)


def wait_for(client: httpx.Client, status: int) -> dict[str, Any]:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        response = client.get("/ready")
        if response.status_code == status:
            return dict(response.json())
        time.sleep(0.02)
    pytest.fail(f"/ready never answered {status}")


def test_an_engine_without_progress_is_not_ready_and_its_process_lives(node: Any, gate: Gate) -> None:
    _, client = node
    wait_for(client, 200)
    gate.open.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, CHAT, json=BODY)
        assert wait_for(client, 503)["status"] == "not ready"
        assert client.get("/health").status_code == 200
        assert not answer.done()
        gate.open.set()
        assert answer.result(WAIT_S).status_code == 200
    wait_for(client, 200)


def test_beyond_the_queue_a_client_is_told_to_come_back(node: Any, gate: Gate) -> None:
    backend, client = node
    gate.open.clear()
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(client.post, CHAT, json=BODY) for _ in range(2)]
        end = time.monotonic() + WAIT_S
        while backend.engine.load < 2 and time.monotonic() < end:
            time.sleep(0.01)
        refused = client.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        gate.open.set()
        assert [answer.result(WAIT_S).status_code for answer in accepted] == [200, 200]


def test_a_deadline_before_the_first_token_is_an_error_that_nobody_repeats(
    node: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, client = node
    counted = Counted(backend, monkeypatch)
    gate.open.clear()
    threading.Timer(0.5, gate.open.set).start()
    with (
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", timeout=WAIT_S) as api,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        api.chat.completions.create(**BODY, extra_body={"deadline_s": 0.1})
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"
    # The package repeats by itself what may be repeated, twice by default.
    assert counted.asked == 1


def test_a_deadline_before_the_first_token_of_a_stream_that_has_begun_is_an_event(node: Any, gate: Gate) -> None:
    _, client = node
    gate.open.clear()
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", timeout=WAIT_S) as api:
        stream = iter(api.chat.completions.create(**BODY, stream=True, extra_body={"deadline_s": 1.0}))
        # The engine is stuck before the first token.
        assert next(stream).choices[0].delta.role == "assistant"
        threading.Timer(1.1, gate.open.set).start()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_after_some_tokens_cuts_the_answer(tiny_llama: Path, *, stream: bool) -> None:
    body = {**BODY, "max_tokens": 2_000, "ignore_eos": True, "deadline_s": 0.7, "stream": stream}
    with (
        local_backend(tiny_llama) as backend,
        served(backend) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S) as api,
    ):
        extra = {name: body.pop(name) for name in ("ignore_eos", "deadline_s")}
        answer = api.chat.completions.create(**body, extra_body=extra)
        if stream:
            chunks = list(answer)
            assert chunks[-1].choices[0].finish_reason == "length"
            assert any(chunk.choices[0].delta.content for chunk in chunks)
            assert chunks[-1].model_extra["muser"]["deadline_reached"] is True
        else:
            assert answer.choices[0].finish_reason == "length"
            assert 0 < answer.usage.completion_tokens < 1_900
            assert answer.model_extra["muser"]["deadline_reached"] is True


@pytest.mark.parametrize("deadline", [0, -1, 86_401, "soon", True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 1}),
    ],
)
def test_a_deadline_out_of_range_is_refused_by_name(
    node: Any, path: str, body: dict[str, Any], deadline: object
) -> None:
    _, client = node
    response = client.post(path, json={**body, "deadline_s": deadline})
    assert response.status_code == 400
    assert "deadline_s" in response.json()["error"]["message"]
    assert client.post(path, json={**body, "deadline_s": 60}).status_code == 200
