"""The endpoint in front of a real engine and a tiny model: what a scripted backend cannot show."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from local_backend import CHUNK, LocalBackend, local_backend

from muser_wire.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def backend(tiny_llama: Path) -> Iterator[LocalBackend]:
    with local_backend(tiny_llama) as backend:
        yield backend


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
    timings = body["muser"]["timings"]
    none = dict.fromkeys(("memory", "disk", "peer", "remote_computed"), 0)
    assert timings.pop("tokens_by_origin") == {**none, "local_computed": body["usage"]["prompt_tokens"] - 1}
    assert set(timings) == {"prefill_s", "wire_s", "first_token_s", "decode_s", "tokens_per_second"}
    assert all(value is not None and value >= 0 for value in timings.values())
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


def test_several_answers_differ_by_their_seeds_and_repeat(kit: Any, ask: Any) -> None:
    options = {"temperature": 1.5, "seed": 7, "max_tokens": 12, "n": 3}
    first = ask(**options).json()
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36
    assert texts[0] == content(ask(**{**options, "n": 1}))
    events = kit.sse(ask(**options, stream=True))
    streamed = ["", "", ""]
    for event in events[:-1]:
        choice = event["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    assert sorted(e["choices"][0]["index"] for e in events[:-1] if e["choices"][0]["finish_reason"]) == [0, 1, 2]


def test_likelihoods_are_the_same_streamed(kit: Any, ask: Any) -> None:
    options = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    whole = ask(**options).json()["choices"][0]["logprobs"]["content"]
    assert len(whole) == 10
    for entry in whole:
        assert entry["logprob"] <= 0
        # Greedy: the likeliest is the one that was taken.
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] >= entry["top_logprobs"][1]["logprob"]
    streamed = [
        entry
        for event in kit.sse(ask(**options, stream=True))[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


def test_a_schema_is_followed_whatever_the_weights_say(ask: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}},
        "required": ["sure", "kind"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "k", "schema": schema, "strict": True}}
    for seed in range(4):
        response = ask(response_format=wanted, temperature=1.5, seed=seed).json()
        value = json.loads(response["choices"][0]["message"]["content"])
        assert set(value) == {"sure", "kind"}
        assert isinstance(value["sure"], bool)
        assert value["kind"] in ("x", "yy")
        assert response["choices"][0]["finish_reason"] == "stop"


def test_a_schema_that_cannot_be_followed_is_refused(ask: Any) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}, {"not": {}}):
        wanted = {"type": "json_schema", "json_schema": {"name": "k", "schema": schema}}
        error = ask(response_format=wanted).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "response_format")


def optional(count: int) -> dict[str, Any]:
    """The schema of an object with so many properties, none of which is required."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "k", "schema": schema}}


@pytest.mark.parametrize("schema", [optional(600), {"anyOf": [optional(25)] * 20}])
def test_a_large_schema_is_followed(ask: Any, schema: dict[str, Any]) -> None:
    response = ask(response_format=named(schema), temperature=0, max_tokens=24)
    assert response.status_code == 200
    assert content(response)[0] == "{"


TOO_LARGE = optional(1100)


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def test_a_schema_that_is_too_large_is_refused_by_name_before_anything_runs(
    kit: Any, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "submit_all", lambda _parts: pytest.fail("it was submitted"), raising=False)
    # Only named to the model, for this context is small.
    template = "{{ messages[0].content }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    call = kit.caller(other=backend, template=template).call
    turns = [{"role": "user", "content": "Hi"}]
    small, large = tool("f", optional(2)), tool("g", TOO_LARGE, strict=True)
    chats: list[tuple[dict[str, Any], str]] = [
        ({"response_format": named(TOO_LARGE)}, "response_format"),
        ({"response_format": named(TOO_LARGE), "stream": True}, "response_format"),
        ({"response_format": named(TOO_LARGE), "tools": [small]}, "response_format"),
        ({"response_format": named(optional(2)), "tools": [small, large]}, "tools"),
        ({"tools": [large], "tool_choice": "required"}, "tools"),
        ({"tools": [small, large], "tool_choice": "required"}, "tools"),
        ({"tools": [large]}, "tools"),
    ]
    asked = [("/v1/chat/completions", {"messages": turns, **body}, param) for body, param in chats]
    form = {"type": "json_schema", "name": "k", "schema": TOO_LARGE}
    asked.append(("/v1/responses", {"input": "Hi", "text": {"format": form}}, "text.format"))
    settings = {"max_tokens": 9, "output_config": {"format": form}}
    asked.append(("/v1/messages", {"messages": turns, **settings}, "output_config.format"))
    for path, body, param in asked:
        response = call(path, **body)
        assert response.status_code == 400, (path, param)
        assert repr(param) in response.json()["error"]["message"]
        assert "too complex" in response.json()["error"]["message"]


def test_what_is_too_large_behind_a_choice_fails_that_answer_alone(ask: Any) -> None:
    # Every answer gets there, after a choice between true and false.
    schema = {"type": "array", "items": TOO_LARGE, "minItems": 1, "maxItems": 1}
    several = {"type": "object", "properties": {"z": {"type": "boolean"}, "a": schema}, "required": ["z", "a"]}
    response = ask(response_format=named({**several, "additionalProperties": False}), temperature=0)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
    assert ask(max_tokens=1).status_code == 200


def test_more_answers_than_there_are_places_are_refused_by_name(tiny_llama: Path, kit: Any) -> None:
    with local_backend(tiny_llama, max_batch=2, max_queue=2) as backend:
        call = kit.caller(other=backend).call
        turns = [{"role": "user", "content": "Hi"}]
        for stream in (False, True):
            chat = call("/v1/chat/completions", messages=turns, n=5, max_tokens=2, stream=stream)
            texts = call("/v1/completions", prompt=["a"] * 5, max_tokens=2, stream=stream)
            both = call("/v1/completions", prompt=["a"] * 3, n=2, max_tokens=2, stream=stream)
            errors = [response.json()["error"] for response in (chat, texts, both)]
            assert [response.status_code for response in (chat, texts, both)] == [400, 400, 400]
            assert [error["param"] for error in errors] == ["n", "prompt", "prompt"]
            assert all("4 answers at most" in error["message"] for error in errors)
        assert backend.engine.load == 0
        assert len(call("/v1/chat/completions", messages=turns, n=4, max_tokens=2).json()["choices"]) == 4
        assert len(call("/v1/completions", prompt=["a"] * 4, max_tokens=2).json()["choices"]) == 4


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["count"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]


def test_a_required_call_is_made_and_read(kit: Any, ask: Any) -> None:
    named = {"type": "function", "function": {"name": "second"}}
    options = {"tools": TOOLS, "tool_choice": named, "temperature": 1.0, "seed": 3}
    choice = ask(**options).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "second"
    assert isinstance(json.loads(call["function"]["arguments"])["count"], int)
    events = kit.sse(ask(**options, stream=True))
    streamed = [c for e in events[:-1] for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert {part["index"] for part in streamed} == {0}
    assert streamed[0]["function"]["name"] == call["function"]["name"]
    assert "".join(part["function"]["arguments"] for part in streamed) == call["function"]["arguments"]


def test_a_stop_token_ends_the_answer(ask: Any, backend: LocalBackend) -> None:
    entries = ask(temperature=0, max_tokens=8, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    stop = entries[5]["bytes"]
    first = next(index for index, entry in enumerate(entries) if entry["bytes"] == stop)
    ids = [i for i in range(512) if list(backend.tokenizer.token_bytes(i)) == stop]
    response = ask(temperature=0, max_tokens=8, stop=ids)
    assert response.json()["usage"]["completion_tokens"] == first
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def test_a_ban_changes_greedy_text(ask: Any, backend: LocalBackend) -> None:
    first = ask(temperature=0, max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]
    banned = [i for i in range(512) if list(backend.tokenizer.token_bytes(i)) == first["bytes"]]
    other = ask(temperature=0, max_tokens=1, logit_bias={str(i): -100 for i in banned})
    assert content(other) != content(ask(temperature=0, max_tokens=1))


def test_an_answer_does_not_depend_on_who_else_is_served(kit: Any, backend: LocalBackend) -> None:
    caller = kit.caller(other=backend)
    body = {"temperature": 1.2, "seed": 11, "max_tokens": 24, "frequency_penalty": 0.5, "top_p": 0.9}
    alone = content(caller.chat("Where?", **body))
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(caller.chat, f"other {i}", max_tokens=20) for i in range(4)]
        among = content(pool.submit(caller.chat, "Where?", **body).result())
        assert all(other.result().status_code == 200 for other in others)
    assert among == alone


def test_formats_that_cannot_be_constrained_refuse_by_name(kit: Any) -> None:
    kit.backend.tokenizer.chat_template = None
    kit.backend.tokenizer.__class__ = type(
        "Muse",
        (type(kit.backend.tokenizer),),
        {"special_ids": {"<|start|>": 256, "<|message|>": 257, "<|eot|>": 258, "<|eom|>": 259}, "vocab_size": 260},
    )
    caller = kit.caller()
    schema = {"type": "object", "properties": {"day": {"type": "string", "pattern": "^....-..-..$"}}}
    strict = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    assert caller.chat(tools=strict, tool_choice="required").json()["error"]["param"] == "tools"
    assert caller.chat(tools=strict).json()["error"]["param"] == "tools"
    assert caller.chat(reasoning_effort="none").json()["error"]["param"] == "reasoning_effort"
    assert caller.chat(tools=TOOLS).status_code == 200
    kit.backend.tokenizer.chat_template = "{{ messages[0].content }}"
    caller = kit.caller()
    assert caller.chat(tools=TOOLS).json()["error"]["param"] == "tools"
    result = [{"role": "tool", "tool_call_id": "c", "content": "x"}]
    assert caller.call("/v1/chat/completions", messages=result).json()["error"]["param"] == "tools"
    assert caller.chat().status_code == 200


def test_strict_tools_are_taken(ask: Any) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert ask(tools=strict, max_tokens=8, temperature=0).status_code == 200


def test_variables_that_the_template_does_not_read_are_refused(ask: Any) -> None:
    error = ask(chat_template_kwargs={"mood": "calm"}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "chat_template_kwargs.mood")
    # Nor can a client take the place of what the server says itself.
    assert ask(chat_template_kwargs={"messages": []}).status_code == 400
