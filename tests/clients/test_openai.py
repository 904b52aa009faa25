"""The `openai` package against a node: the calls that people make."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from annotated_types import Len
from made_serve import made_serve
from pydantic import BaseModel


class Kind(BaseModel):
    sure: bool
    count: int


class Where(Enum):
    SEA = "sea"
    SKY = "sky"


class Look(BaseModel):
    """Looks."""

    where: Where
    kinds: Annotated[list[Kind], Len(max_length=2)]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}, "at": {"enum": ["sea", "sky"]}},
            "required": ["far", "at"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", params=["the HTTP side alone", "make serve"])
def client(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    with contextlib.ExitStack() as stack:
        if request.param == "make serve":
            folder = tmp_path_factory.mktemp("served")
            # The folder's name is the model's in the API.
            (folder / "tiny").symlink_to(tiny_llama)
            url = stack.enter_context(made_serve(folder / "tiny", folder / "log"))
        else:
            url = request.getfixturevalue("node").url
        options: Any = {"api_key": "none", "max_retries": 0, "timeout": 60}
        yield stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", **options))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "muser"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0.9, "seed": 5}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**options) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(pieces) == whole.choices[0].message.content


def test_likelihoods(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 4
    spelled = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert spelled.decode("utf-8", "replace") == choice.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_several_answers_and_penalties(client: openai.OpenAI) -> None:
    answers = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, seed=1, max_tokens=8, presence_penalty=1, frequency_penalty=1,
        logit_bias={"7": -100}, stop=["\x00"], user="u",
    )  # fmt: skip
    assert [choice.index for choice in answers.choices] == [0, 1]


def test_tools_whole_streamed_and_answered(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "seed": 2}
    message = client.chat.completions.create(**options).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"far", "at"}
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    history = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
    after = client.chat.completions.create(
        model="tiny", messages=history, tools=[TOOL], tool_choice="none", max_tokens=4
    )
    assert after.choices[0].message.tool_calls is None


def test_the_arguments_of_a_tool_made_of_models_are_parsed(client: openai.OpenAI) -> None:
    """The package makes a strict schema of it, with references to definitions of its own."""
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, tools=[openai.pydantic_function_tool(Look)], tool_choice="required", seed=4
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Look)


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Kind, temperature=0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Kind)


def test_an_error_has_its_fields(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature", "invalid_value", "invalid_request_error",
    )  # fmt: skip


def test_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, logprobs=1)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 6
    streamed = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "input": "Hello", "temperature": 0}
    whole = client.responses.create(**options, max_output_tokens=8)
    assert whole.status == "incomplete"
    events = list(client.responses.create(**options, max_output_tokens=8, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    with client.responses.stream(**options, text_format=Kind) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(pieces)
    assert isinstance(final.output_parsed, Kind)


def test_responses_with_tools_and_structure(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    called = client.responses.create(model="tiny", input="Hello", tools=[tool], tool_choice="required")
    (item,) = called.output
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"far", "at"}
    history: Any = [
        {"role": "user", "content": "Hello"},
        item.model_dump(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "seen"},
    ]
    assert client.responses.create(model="tiny", input=history, tools=[tool], max_output_tokens=4).id != called.id
    parsed = client.responses.parse(model="tiny", input="Hello", text_format=Kind, temperature=0)
    assert isinstance(parsed.output_parsed, Kind)


def test_a_seed_repeats_an_answer_alone_and_among_others(client: openai.OpenAI) -> None:
    def ask(text: str, seed: int) -> str:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], seed=seed, temperature=1.2, top_p=0.95,
            max_tokens=24, presence_penalty=0.5,
        )  # fmt: skip
        return answer.choices[0].message.content or ""

    alone = [ask("Where?", 9), ask("Where?", 9)]
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(ask, f"other {number}", number) for number in range(4)]
        among = pool.submit(ask, "Where?", 9).result()
        assert all(other.result() for other in others)
    assert alone == [among, among]
