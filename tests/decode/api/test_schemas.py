from __future__ import annotations

from typing import Any

import pytest

from muser_decode.api.errors import ApiError
from muser_decode.api.parameters import Parameters
from muser_decode.api.schemas import Asked, ChatRequest, circular_reference, read_chat_request
from muser_decode.api.tools import Toolbox
from muser_decode.engine.request import SamplingParams
from muser_decode.formats.base import ANY_OBJECT
from muser_decode.formats.conversation import Message, Tool, ToolCall

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


def called(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def read(**fields: Any) -> ChatRequest:
    return read_chat_request({"model": "m", "messages": [USER], **fields})


def test_a_bare_request_has_openais_defaults() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
    parameters = Parameters(None, sampling, stop=(), stop_ids=(), ignore_eos=False, n=1)
    asked = Asked("m", (Message("user", "x"),), parameters, Toolbox(), None, None, {})
    assert read() == ChatRequest(asked, stream=False, include_usage=False, progress=False)


def test_every_supported_parameter_is_read() -> None:
    request = read(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-(2**63),
        stop=["a", 7, "b"],
        stop_token_ids=[8],
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 0, "07": 1.5},
        logprobs=True,
        top_logprobs=3,
        n=2,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "progress": True, "unknown": 1},
        user="u",
        metadata={"k": "v"},
        anything="goes",
    )
    parameters = request.asked.parameters
    assert parameters.max_tokens == 7
    assert parameters.sampling == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-(2**63),
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (7, 1.5)),
        logprobs=3,
    )
    assert (parameters.stop, parameters.stop_ids, parameters.ignore_eos) == (("a", "b"), (7, 8), True)
    assert (parameters.n, request.stream, request.include_usage, request.progress) == (2, True, True, True)


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
        {"echo": False, "suffix": "", "bad_words": [], "prompt_logprobs": None, "allowed_token_ids": None},
        {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless).asked.parameters.sampling == SamplingParams(temperature=1.0)


def test_messages_become_roles_and_text() -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
    ]
    assert read(messages=messages).asked.messages == (
        Message("system", "d"),
        Message("system", ""),
        Message("user", "a\nb", "Ann"),
        Message("assistant", "c"),
    )


@pytest.mark.parametrize(("given", "used"), [(0, 0.0), (1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6), (2, 2.0)])
def test_a_temperature_too_small_to_divide_by_is_greedy(given: float, used: float) -> None:
    assert read(temperature=given).asked.parameters.sampling.temperature == used


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{}]}, "functions"),
    ({"best_of": 2}, "best_of"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"store": True}, "store"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ({"max_output_tokens": 5}, "max_output_tokens"),
    ({"stop_sequences": ["x"]}, "stop_sequences"),
    ({"instructions": "x"}, "instructions"),
    ({"system": "x"}, "system"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].type"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
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
    ({"messages": [USER] * 8193}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls", "invalid_value"),
    ({"messages": [called({})]}, "messages[0].tool_calls[0].function", "missing_required_parameter"),
    (
        {"messages": [called({"function": {}})]},
        "messages[0].tool_calls[0].function.name",
        "missing_required_parameter",
    ),
    *(
        (
            {"messages": [called({"function": {"name": "f", "arguments": arguments}})]},
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        )
        for arguments in (
            "x",
            "[]",
            "NaN",
            '"\\ud800"',
            '{"a": "\\ud800"}',
            "[" * 9999,
            '{"a":' * 200 + "1" + "}" * 200,
        )
    ),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [TOOL] * 257}, "tools", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters",
        "invalid_type",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools[0].function.strict",
        "invalid_type",
    ),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tool_choice": 1}, "tool_choice", "invalid_type"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"response_format": 1}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 300_000}}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"},
        "response_format",
        "invalid_value",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "invalid_value"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "invalid_type"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "invalid_type"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]", "invalid_type"),
    ({"stop_token_ids": list(range(65))}, "stop", "invalid_value"),
    ({"stop": [True]}, "stop[0]", "invalid_type"),
    ({"stop": -1}, "stop", "invalid_value"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
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
    ({"stop": {}}, "stop", "invalid_type"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a", 1.5]}, "stop[1]", "invalid_type"),
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


def test_calls_and_their_results_become_turns() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    assert read(messages=messages).asked.messages[1:] == (
        Message("assistant", "", None, "hm", (ToolCall("c1", "f", {"a": [1]}),)),
        Message("tool", "4", "f", tool_call_id="c1"),
        Message("tool", "", None, tool_call_id="c2"),
        Message("assistant", "no"),
    )


def test_the_choice_narrows_the_tools() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {}}} for name in "fg"]
    f, g = Tool("f", "d"), Tool("g", "d")
    named = {"type": "function", "function": {"name": "g"}}
    assert read(tools=tools).asked.toolbox == Toolbox((f, g))
    assert read(tools=tools, tool_choice="none").asked.toolbox == Toolbox()
    assert read(tools=tools, tool_choice="required").asked.toolbox == Toolbox((f, g), required=True)
    assert read(tools=tools, tool_choice=named).asked.toolbox == Toolbox((g,), required=True)
    assert read(tools=tools, parallel_tool_calls=False).asked.toolbox == Toolbox((f, g), parallel=False)


def test_formats_of_answers() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert read(response_format=wanted).asked.schema == schema
    assert read(response_format={"type": "json_object"}).asked.schema == ANY_OBJECT
    assert read(response_format={"type": "text"}).asked.schema is None


CIRCLES: list[tuple[dict[str, Any], str | None]] = [
    ({"$ref": "#"}, "#"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
    ({"properties": {"a/b": {"$ref": "#/properties/a~1b"}}}, "#/properties/a~1b"),
    ({"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]}, "#/anyOf/0"),
    # What holds itself among other things, and what is somewhere else.
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, None),
    ({"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, None),
    ({"properties": {"$ref": {"type": "string"}}}, None),
    ({"$ref": "#/$defs/none"}, None),
    ({"anyOf": [{"$ref": "#/anyOf/7"}, {"$ref": "other.json"}]}, None),
    # A long chain is looked through once.
    ({"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}}, None),
]


@pytest.mark.parametrize(("schema", "circle"), CIRCLES)
def test_a_reference_that_leads_only_to_itself_is_refused(schema: dict[str, Any], circle: str | None) -> None:
    assert (circular_reference(schema) is None) == (circle is None)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if circle is None:
        assert read(response_format=wanted).asked.schema == schema
        return
    with pytest.raises(ApiError, match="leads only to itself") as caught:
        read(response_format=wanted)
    assert (caught.value.status, caught.value.param) == (400, "response_format.json_schema.schema")


def test_reasoning_and_variables() -> None:
    asked = read(reasoning_effort="low", chat_template_kwargs={"mood": "calm"}).asked
    assert (asked.effort, asked.variables) == ("low", {"mood": "calm"})
