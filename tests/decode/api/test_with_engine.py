"""The endpoint in front of a real engine and a tiny model: what a scripted backend cannot show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from muser_decode.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402 - after the BLAS that it is to use

from muser_decode.decoder import MlxDecoder  # noqa: E402
from muser_decode.engine.loop import Engine  # noqa: E402
from muser_wire.geometry import ElementType  # noqa: E402
from muser_wire.model.checkpoint import open_checkpoint  # noqa: E402
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from muser_decode.engine.generation import Generation
    from muser_decode.engine.request import EventSink, GenerationRequest

CHUNK = 16


@dataclass
class LocalBackend:
    """An engine without a router."""

    engine: Engine
    tokenizer: Tokenizer
    context_tokens: int
    model_id: str = "tiny"
    aliases: frozenset[str] = frozenset()
    created: int = 1

    def submit(self, request: GenerationRequest, sink: EventSink) -> Generation:
        return self.engine.submit(request, sink, None, "no producer")

    def ready(self) -> tuple[bool, str]:
        return self.engine.healthy(), "engine"

    def describe_status(self) -> dict[str, Any]:
        return {"requests": self.engine.load}


@pytest.fixture(scope="module")
def backend(tiny_llama: Path) -> Iterator[LocalBackend]:
    checkpoint = open_checkpoint(tiny_llama)
    engine = Engine(
        lambda: MlxDecoder(checkpoint, dtype=mx.float32, kv_element=ElementType.F16, packed=False),
        chunk_tokens=CHUNK,
        max_queue=4,
        staging_nbytes=1 << 16,
    )
    engine.start()
    yield LocalBackend(engine, load_tokenizer(tiny_llama), checkpoint.spec.max_positions)
    engine.stop()


@pytest.fixture
def ask(kit: Any, backend: LocalBackend) -> Any:
    return kit.caller(other=backend).chat


def content(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_greedy_answer_is_the_same_twice_and_streamed(kit: Any, ask: Any) -> None:
    first = ask("Where is it?", temperature=0, max_tokens=12)
    body = first.json()
    assert first.headers["x-muser-route"] == "local"
    assert (body["muser"]["route"], body["muser"]["reason"]) == ("local", "no producer")
    assert body["usage"]["completion_tokens"] == 12
    assert body["choices"][0]["finish_reason"] == "length"
    # All but the last prompt token are prefilled here.
    assert body["muser"]["local_tokens"] == body["usage"]["prompt_tokens"] - 1
    assert all(value is not None and value >= 0 for value in body["muser"]["timings"].values())
    assert content(ask("Where is it?", temperature=0, max_tokens=12)) == content(first)
    events = kit.sse(ask("Where is it?", temperature=0, max_tokens=12, stream=True))
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event != "[DONE]")
    assert streamed == content(first)
    assert events[-2]["muser"]["local_tokens"] == body["muser"]["local_tokens"]


def test_a_seed_repeats_an_answer_and_another_changes_it(ask: Any) -> None:
    texts = [content(ask(temperature=1.5, seed=seed, max_tokens=24)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0},
        {"top_p": 0.0, "top_k": 3},
        {"top_k": 1},
        {"min_p": 1},
        {"temperature": 1e-300},
        {"temperature": 1e-6},
    ],
)
def test_the_narrowest_settings_are_greedy(ask: Any, sampling: dict[str, float]) -> None:
    assert content(ask(max_tokens=6, **sampling)) == content(ask(max_tokens=6, temperature=0))


def test_a_stop_string_ends_the_generation(kit: Any, ask: Any, backend: LocalBackend) -> None:
    whole = content(ask(temperature=0, max_tokens=40))
    # A stop string from the middle of the text, and one that only begins to match before it.
    stop = next(whole[i : i + 3] for i in range(5, len(whole)) if whole.find(whole[i : i + 3]) == i)
    response = ask(temperature=0, stop=[stop, whole[2:5] + "\x00"])
    assert content(response) == whole[: whole.index(stop)]
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert response.json()["usage"]["completion_tokens"] <= 40
    assert kit.eventually(lambda: backend.engine.load == 0)


def test_an_answer_runs_to_the_end_of_the_context(kit: Any, tiny_llama: Path, backend: LocalBackend) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    template_tokens = 3 + len(tokenizer.encode("user\n")) + 2 * len(tokenizer.encode("\n"))
    small = LocalBackend(backend.engine, backend.tokenizer, context_tokens=template_tokens + 40)
    response = kit.caller(other=small).chat("hi", temperature=0)
    usage = response.json()["usage"]
    assert usage["total_tokens"] == small.context_tokens
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_a_prompt_beyond_the_context_starts_nothing_and_the_next_request_works(ask: Any, backend: LocalBackend) -> None:
    response = ask("word " * backend.context_tokens)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"holds {backend.context_tokens}," in error["message"]
    assert backend.engine.load == 0
    assert ask(max_tokens=1).status_code == 200


def test_a_long_prompt_is_prefilled_in_chunks_and_answered(ask: Any) -> None:
    response = ask("one two three " * 20, temperature=0, max_tokens=2)
    assert response.json()["muser"]["local_tokens"] > 3 * CHUNK
    assert response.json()["usage"]["completion_tokens"] == 2
