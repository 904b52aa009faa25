"""A backend that plays a script from a thread, and clients for the application in front of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from muser_decode.api.limits import Limits
from muser_decode.app import create_app
from muser_decode.engine.request import (
    EventSink,
    Finished,
    FinishReason,
    GenerationRequest,
    Route,
    RouteReport,
    TokenEvent,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPORT = RouteReport(
    route=Route.REMOTE,
    reason="",
    prefill_s=0.5,
    wire_s=0.25,
    remote_tokens=20,
    local_tokens=0,
    segments_verified=6,
    payload_nbytes=4096,
    handoff_id="h-1",
)


class ByteTokenizer:
    """One token for each byte; three control tokens above them."""

    vocab_size = 259
    bos_id = 256
    adds_bos = False
    eos_ids = frozenset({258})
    chat_template = CHATML

    @property
    def special_ids(self) -> dict[str, int]:
        return {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class Cancel:
    """What `submit_all` returns of each: a flag that the script watches."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def cancel(self) -> None:
        self.asked.set()


Script = Callable[[GenerationRequest, EventSink, Cancel], None]


def saying(text: str | bytes, reason: FinishReason = FinishReason.STOP, report: RouteReport | None = REPORT) -> Script:
    """Return a script that says `text` one byte at a time, unless it is cancelled."""

    def play(_request: GenerationRequest, sink: EventSink, cancel: Cancel) -> None:
        data = text.encode() if isinstance(text, str) else text
        if report is not None:
            sink(report)
        sent = 0
        for byte in data:
            if cancel.asked.is_set():
                break
            sink(TokenEvent(byte))
            sent += 1
        end = FinishReason.CANCELLED if cancel.asked.is_set() else reason
        sink(Finished(end, sent, first_token_s=0.75, decode_s=2.0))

    return play


@dataclass
class ScriptedBackend:
    """Plays `script` for each request. Remembers what it was asked."""

    script: Script = field(default_factory=lambda: saying("Hello"))
    model_id: str = "tiny"
    aliases: frozenset[str] = frozenset({"gpt-tiny"})
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    context_tokens: int = 4096
    created: int = 1_700_000_000
    is_ready: tuple[bool, str] = (True, "")
    status: dict[str, Any] = field(default_factory=lambda: {"lane": "native"})
    places: int = 64
    refusal: Exception | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    explained: list[list[int]] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def submit_all(self, parts: Sequence[tuple[GenerationRequest, EventSink]]) -> list[Cancel]:
        if self.refusal is not None:
            raise self.refusal
        return [self._started(request, sink) for request, sink in parts]

    def _started(self, request: GenerationRequest, sink: EventSink) -> Cancel:
        cancel = Cancel()
        self.requests.append(request)
        self.cancels.append(cancel)
        thread = threading.Thread(target=self.script, args=(request, sink, cancel))
        self.threads.append(thread)
        thread.start()
        return cancel

    def ready(self) -> tuple[bool, str]:
        return self.is_ready

    def explain_held(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        self.explained.append(list(prompt_ids))
        return {
            "prompt_tokens": len(prompt_ids),
            "held_tokens": 0,
            "reason": "never seen",
            "blocks": [],
            "elsewhere": [],
            "ignored_stores": [],
        }

    def describe_status(self) -> dict[str, Any]:
        return self.status

    def close(self) -> None:
        for cancel in self.cancels:
            cancel.cancel()
        for thread in self.threads:
            thread.join(timeout=10)


class Caller:
    """Sends requests to one application without a socket."""

    def __init__(self, backend: Any, limits: Limits | None = None, template: str | None = None) -> None:
        # A busy machine may take longer to say the route than a stream's headers wait.
        self.app = create_app(backend, limits or Limits(header_wait_s=10.0), chat_template=template)

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, url, **options)

        return asyncio.run(send())

    def chat(self, text: str = "Hi", **more: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
        return self.request("POST", "/v1/chat/completions", json=body)

    def call(self, path: str, **body: Any) -> httpx.Response:
        return self.request("POST", path, json={"model": "tiny", **body})

    def post(self, body: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        headers = {"content-type": "application/json"} if headers is None else headers
        return self.request("POST", "/v1/chat/completions", content=body, headers=headers)


def sse(response: httpx.Response) -> list[Any]:
    """Return the events of a stream: JSON values, "[DONE]", and comments as they stand."""
    events: list[Any] = []
    assert response.text.endswith("\n\n")
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            events.append(block)
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Return whether `condition` came true in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Return the events of a stream whose clients tell them apart by name; comments are left out."""
    events: list[tuple[str, Any]] = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        first, _, second = block.partition("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        events.append((data["type"], data))
    return events


@dataclass(frozen=True)
class Kit:
    """What the tests of this folder share."""

    backend: ScriptedBackend
    saying: Callable[..., Script]
    sse: Callable[[httpx.Response], list[Any]]
    eventually: Callable[..., bool]
    caller: Callable[..., Caller]
    report: RouteReport
    named_events: Callable[[httpx.Response], list[tuple[str, Any]]]


@pytest.fixture
def kit() -> Iterator[Kit]:
    backend = ScriptedBackend()
    yield Kit(
        backend,
        saying,
        sse,
        eventually,
        lambda limits=None, other=None, template=None: Caller(backend if other is None else other, limits, template),
        REPORT,
        named_events,
    )
    backend.close()
