from __future__ import annotations

from typing import Any

import pytest

from muser_decode.api.errors import ApiError
from muser_decode.api.limits import Limits
from muser_decode.api.messages_request import read_messages_request
from muser_decode.engine.request import Failed, FinishReason, SamplingParams
from muser_decode.errors import EngineBusy
from muser_decode.formats.conversation import Message, Tool, ToolCall

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
CALL = 'Wait.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read(**body: Any) -> Any:
    return read_messages_request({"model": "tiny", "max_tokens": 9, "messages": [USER], **body}).asked


def test_an_answer_in_one_piece(kit: Any) -> None:
    response = kit.caller().call(PATH, max_tokens=9, messages=[USER], system=[{"type": "text", "text": "S"}])
    body = response.json()
    assert response.headers["x-muser-route"] == "remote"
    assert body.pop("id").startswith("msg_")
    assert body.pop("muser")["route"] == "remote"
    prompt_tokens = len(kit.backend.requests[0].prompt_ids)
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "output_tokens": 5,
        },
    }
    assert bytes(i for i in kit.backend.requests[0].prompt_ids if i < 256) == b"system\nS\nuser\nHi\nassistant\n"


def test_why_an_answer_ended(kit: Any) -> None:
    def reason(**body: Any) -> Any:
        whole = kit.caller().call(PATH, max_tokens=9, messages=[USER], **body).json()
        return whole["stop_reason"], whole["stop_sequence"]

    assert reason(stop_sequences=["l"]) == ("stop_sequence", "l")
    kit.backend.script = kit.saying("Hel", FinishReason.LENGTH)
    assert reason() == ("max_tokens", None)
    kit.backend.script = kit.saying(CALL)
    assert reason(tools=[TOOL]) == ("tool_use", None)


def test_a_call_that_the_length_cut_has_what_of_it_is_json(kit: Any) -> None:
    kit.backend.script = kit.saying('<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x', FinishReason.LENGTH)
    body = {"max_tokens": 99, "messages": [USER], "tools": [TOOL]}
    answer = kit.caller().call(PATH, **body).json()
    assert (answer["content"][0]["name"], answer["content"][0]["input"]) == ("f", {})
    assert answer["stop_reason"] == "max_tokens"
    events = kit.named_events(kit.caller().call(PATH, **body, stream=True))
    told = "".join(data["delta"]["partial_json"] for name, data in events if name == "content_block_delta")
    assert told == '{"a": 1, "b": "x'
    assert [name for name, _ in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stream_tells_the_same_blocks(kit: Any) -> None:
    kit.backend.script = kit.saying(CALL)
    events = kit.named_events(kit.caller().call(PATH, max_tokens=9, messages=[USER], tools=[TOOL], stream=True))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    second = names.index("content_block_start", 2)
    assert names[second - 1] == "content_block_stop"
    assert set(names[second + 1 : -3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert "".join(d["delta"]["text"] for d in deltas if d["index"] == 0) == "Wait."
    arguments = [d["delta"] for d in deltas if d["index"] == 1]
    assert {delta["type"] for delta in arguments} == {"input_json_delta"}
    # They come as the model writes them.
    assert [delta["partial_json"] for delta in arguments] == ["{", '"a"', ": ", "1}"]
    second = next(d["content_block"] for n, d in events if n == "content_block_start" and d["index"] == 1)
    assert second.pop("id").startswith("toolu_")
    assert second == {"type": "tool_use", "name": "f", "input": {}}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == len(CALL)
    whole = kit.caller().call(PATH, max_tokens=9, messages=[USER], tools=[TOOL]).json()["content"]
    assert whole[0] == {"type": "text", "text": "Wait."}
    assert (whole[1]["name"], whole[1]["input"]) == ("f", {"a": 1})


def test_reasoning_is_a_block_of_its_own(kit: Any) -> None:
    kit.backend.tokenizer.chat_template += "{# <think> #}"
    kit.backend.script = kit.saying("<think>hm</think>Yes")
    body = {"max_tokens": 9, "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert kit.caller().call(PATH, **body).json()["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Yes"},
    ]
    events = kit.named_events(kit.caller().call(PATH, **body, stream=True))
    kinds = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert kinds[0] == "thinking_delta"
    assert kinds[-1] == "text_delta"


def test_a_long_prefill_pings(kit: Any) -> None:
    def play(request: Any, sink: Any, cancel: Any) -> None:
        cancel.asked.wait(0.3)
        kit.saying("ok")(request, sink, cancel)

    kit.backend.script = play
    response = kit.caller(Limits(header_wait_s=0.0, comment_every_s=0.1)).call(
        PATH, max_tokens=9, messages=[USER], stream=True
    )
    assert "event: ping\n" in response.text


def test_tokens_are_counted(kit: Any) -> None:
    caller = kit.caller()
    counted = caller.call("/v1/messages/count_tokens", messages=[USER], tools=[TOOL]).json()
    caller.call(PATH, max_tokens=9, messages=[USER], tools=[TOOL])
    assert counted == {"input_tokens": len(kit.backend.requests[0].prompt_ids)}


def test_errors_have_this_api_s_shape(kit: Any) -> None:
    def error(status: int, **body: Any) -> Any:
        response = kit.caller().call(PATH, **body)
        assert response.status_code == status
        assert response.json()["type"] == "error"
        return response.json()["error"]["type"]

    good = {"max_tokens": 9, "messages": [USER]}
    assert error(400, messages=[USER]) == "invalid_request_error"
    assert error(404, **good, model="x") == "not_found_error"
    kit.backend.refusal = EngineBusy("full")
    for stream in (False, True):
        assert error(503, **good, stream=stream) == "overloaded_error"
    kit.backend.refusal = None
    kit.backend.script = lambda _request, sink, _cancel: sink(Failed("broken"))
    assert error(500, **good) == "api_error"
    assert error(500, **good, stream=True) == "api_error"


def test_a_failure_after_the_start_is_an_error_event(kit: Any) -> None:
    def play(_request: Any, sink: Any, _cancel: Any) -> None:
        sink(kit.report)
        sink(Failed("device lost"))

    kit.backend.script = play
    name, data = kit.named_events(kit.caller().call(PATH, max_tokens=9, messages=[USER], stream=True))[-1]
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "device lost"})


def test_blocks_become_turns() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "2"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": []},
    ]
    assert read(messages=messages, system="s").messages == (
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "b", None, "hm", (ToolCall("t1", "f", {"x": 1}), ToolCall("t2", "g", {}))),
        Message("tool", "one", "f", tool_call_id="t1"),
        Message("tool", "error: 2", "g", tool_call_id="t2"),
        Message("user", "go on"),
        Message("assistant", ""),
    )


def test_parameters_are_read() -> None:
    asked = read(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["a"], tools=[TOOL], metadata={"user_id": "u"})
    assert asked.parameters.sampling == SamplingParams(temperature=0.5, top_p=0.9, top_k=4)
    assert (asked.parameters.stop, asked.parameters.max_tokens) == (("a",), 9)
    assert asked.toolbox.tools == (Tool("f", "d", {"type": "object"}),)
    more = {"logit_bias": {"5": -1}, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    assert read(**more, min_p=0.25, seed=7, temperature=0).parameters.sampling == SamplingParams(
        temperature=0.0,
        min_p=0.25,
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias=((5, -1.0),),
    )
    forced = read(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True}).toolbox
    assert (forced.required, forced.parallel) == (True, False)
    assert read(tools=[TOOL], tool_choice={"type": "any"}).toolbox.required
    assert read(tools=[TOOL], tool_choice={"type": "none"}).toolbox.tools == ()
    assert (read(thinking={"type": "disabled"}).effort, read(thinking={"type": "adaptive"}).effort) == ("none", None)


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"stop": []},
        {"stop": None, "response_format": None, "container": None},
        {"response_format": {"type": "text"}},
        {"mcp_servers": []},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"context_management": {"edits": []}, "service_tier": "auto", "betas": ["x"], "speed": "fast"},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless) == read()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].name",
    ),
    ({"system": 1}, "system"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": {"id": "c"}}, "container"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"stop": ["a"]}, "stop"),
    ({"stop": "a"}, "stop"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"logprobs": True}, "logprobs"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"thinking": {"type": "bogus"}}, "thinking.type"),
    ({"thinking": {"type": 1}}, "thinking.type"),
    ({"thinking": "enabled"}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "output_config.format.schema"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
        },
        "output_config.format",
    ),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_answer_goes_on_from_the_assistant_s_last_message(kit: Any) -> None:
    begun = [USER, {"role": "assistant", "content": "{ "}]
    body = kit.caller().call(PATH, max_tokens=9, messages=begun).json()
    assert bytes(i for i in kit.backend.requests[0].prompt_ids if i < 256) == b"user\nHi\nassistant\n{"
    assert body["content"] == [{"type": "text", "text": "Hello"}]
    kit.backend.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    refused = kit.caller().call(PATH, max_tokens=9, messages=begun)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_schema_of_the_answer_is_read() -> None:
    schema = {"type": "object"}
    assert read(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}).schema == schema
    asked = read(output_config={"effort": "max"})
    assert (asked.schema, asked.effort, asked.wished) == (None, "xhigh", True)
