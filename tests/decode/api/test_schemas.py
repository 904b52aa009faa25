from __future__ import annotations

from typing import Any

import pytest

from muser_decode.api.errors import ApiError
from muser_decode.api.schemas import ChatRequest, Message, read_chat_request
from muser_decode.engine.request import SamplingParams

USER = {"role": "user", "content": "x"}


def read(**fields: Any) -> ChatRequest:
    return read_chat_request({"model": "m", "messages": [USER], **fields})


def test_a_bare_request_has_openais_defaults() -> None:
    assert read() == ChatRequest(
        model="m",
        messages=(Message("user", "x"),),
        max_tokens=None,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None),
        stop=(),
        stream=False,
        include_usage=False,
    )


def test_every_supported_parameter_is_read() -> None:
    request = read(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-(2**63),
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True, "unknown": 1},
        user="u",
        metadata={"k": "v"},
        anything="goes",
    )
    assert request.max_tokens == 7
    assert request.sampling == SamplingParams(temperature=0.0, top_p=0.5, top_k=40, min_p=0.1, seed=-(2**63))
    assert (request.stop, request.stream, request.include_usage) == (("a", "b"), True, True)


def test_null_means_the_default() -> None:
    names = (
        "max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stream stream_options n tools "
        "tool_choice response_format logprobs top_logprobs logit_bias presence_penalty frequency_penalty "
        "repetition_penalty audio modalities"
    )
    assert read(**dict.fromkeys(names.split())) == read()


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"tools": []},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logprobs": False},
        {"logit_bias": {}},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"repetition_penalty": 1.0},
        {"modalities": ["text"]},
        {"top_k": -1},
        {"stop": []},
        {"max_tokens": 3, "max_completion_tokens": 3, "seed": None},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless).sampling == SamplingParams(temperature=1.0)


def test_messages_become_roles_and_text() -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
    ]
    assert read(messages=messages).messages == (
        Message("system", "d"),
        Message("system", ""),
        Message("user", "a\nb", "Ann"),
        Message("assistant", "c"),
    )


@pytest.mark.parametrize(("given", "used"), [(0, 0.0), (1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6), (2, 2.0)])
def test_a_temperature_too_small_to_divide_by_is_greedy(given: float, used: float) -> None:
    assert read(temperature=given).sampling.temperature == used


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[1].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.reason, caught.value.param) == (400, "unsupported_parameter", param)


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": 1}, "model", "invalid_type"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": "x"}, "messages", "invalid_type"),
    ({"messages": {}}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [USER, "x"]}, "messages[1]", "invalid_type"),
    ({"messages": [None]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [USER, USER, {"role": "user"}]}, "messages[2].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"messages": [{**USER, "name": 3}]}, "messages[0].name", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": "7"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": False}, "temperature", "invalid_type"),
    ({"temperature": 10**400}, "temperature", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 0.5}, "top_k", "invalid_type"),
    ({"min_p": -1}, "min_p", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": "1"}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": 1}, "stop", "invalid_type"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": "x" * 513}, "stop", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), INVALID)
def test_a_wrong_field_is_refused_by_its_path(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.reason, caught.value.param) == (400, reason, param)
    assert len(str(caught.value)) < 300
