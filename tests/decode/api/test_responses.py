from __future__ import annotations

import json
from typing import Any

import pytest

from muser_decode.api.errors import ApiError
from muser_decode.api.responses_request import read_responses_request
from muser_decode.engine.request import Failed, FinishReason
from muser_decode.formats.conversation import Message, Tool, ToolCall

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
CALL = 'Wait.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read(**body: Any) -> Any:
    return read_responses_request({"model": "tiny", "input": "x", **body}).asked


def test_an_answer_in_one_piece(kit: Any) -> None:
    body = (
        kit.caller().call(PATH, input="Hi", instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"}).json()
    )
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == (
        "response", "completed", None, None,
    )  # fmt: skip
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert body["usage"]["output_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 5
    assert (body["instructions"], body["max_output_tokens"], body["metadata"]) == ("Be brief.", 9, {"a": "b"})
    assert body["muser"]["route"] == "remote"
    (asked,) = kit.backend.requests
    assert bytes(i for i in asked.prompt_ids if i < 256) == b"system\nBe brief.\nuser\nHi\nassistant\n"
    assert asked.max_new_tokens == 9


def test_an_answer_that_was_cut_off_is_incomplete(kit: Any) -> None:
    kit.backend.script = kit.saying("Hel", FinishReason.LENGTH)
    body = kit.caller().call(PATH, input="Hi").json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"


def test_a_stream_tells_the_same_items(kit: Any) -> None:
    kit.backend.script = kit.saying(CALL)
    events = kit.named_events(kit.caller().call(PATH, input="Hi", tools=[TOOL], stream=True))
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name for name, _ in events if not name.endswith(("output_text.delta", "arguments.delta"))]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    whole = events[-1][1]["response"]
    assert whole["output"] == done
    assert (text, done[0]["content"][0]["text"]) == ("Wait.", "Wait.")
    assert (done[1]["type"], done[1]["name"], json.loads(done[1]["arguments"])) == ("function_call", "f", {"a": 1})
    pieces = [data for name, data in events if name == "response.function_call_arguments.delta"]
    assert [piece["delta"] for piece in pieces] == ["{", '"a"', ": ", "1}"]
    assert {(piece["item_id"], piece["output_index"]) for piece in pieces} == {(done[1]["id"], 1)}
    assert whole["status"] == "completed"
    added = [data for name, data in events if name == "response.output_item.added"]
    assert [(data["output_index"], data["item"]["id"]) for data in added] == [(0, done[0]["id"]), (1, done[1]["id"])]
    same = kit.caller().call(PATH, input="Hi", tools=[TOOL]).json()["output"]
    assert [{**item, "id": 0, "call_id": 0} for item in same] == [{**item, "id": 0, "call_id": 0} for item in done]


def test_a_call_that_the_length_cut_is_incomplete(kit: Any) -> None:
    kit.backend.script = kit.saying('<tool_call>{"name": "f", "arguments": {"a": "x', FinishReason.LENGTH)
    for stream in (False, True):
        response = kit.caller().call(PATH, input="Hi", tools=[TOOL], stream=stream)
        whole = kit.named_events(response)[-1][1]["response"] if stream else response.json()
        (item,) = whole["output"]
        assert (item["type"], item["arguments"], item["status"]) == ("function_call", '{"a": "x', "incomplete")
        assert whole["status"] == "incomplete"


def test_a_tool_whose_input_is_a_text_is_called_with_one(kit: Any) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"definition": "start: LF"}}
    text = '*** Begin "Patch"\n+é\n'
    kit.backend.script = kit.saying(
        f"<tool_call>{json.dumps({'name': 'patch', 'arguments': {'input': text}})}</tool_call>"
    )
    response = kit.caller().call(PATH, input="Hi", tools=[patch, {"type": "web_search"}], stream=True)
    assert response.headers["x-muser-ignored-tools"] == "web_search"
    events = kit.named_events(response)
    assert [name for name, _ in events][2:] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = events[-1][1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert (events[3][1]["delta"], events[4][1]["input"]) == (text, text)
    assert events[-1][1]["response"]["tools"] == [patch]
    (tool,) = read(tools=[patch]).toolbox.tools
    assert (tool.name, tool.description) == ("patch", "Edits.\nIts input follows:\nstart: LF")
    items = [
        {"role": "user", "content": "a"},
        {**item, "call_id": "c"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    assert read(input=items).messages[1:] == (
        Message("assistant", "", tool_calls=(ToolCall("c", "patch", {"input": text}),)),
        Message("tool", "done", "patch", tool_call_id="c"),
    )


def test_reasoning_is_an_item_of_its_own(kit: Any) -> None:
    template = kit.backend.tokenizer.chat_template + "{# <think> #}"
    kit.backend.tokenizer.chat_template = template
    kit.backend.script = kit.saying("<think>hm</think>\nYes")
    events = kit.named_events(kit.caller().call(PATH, input="Hi", stream=True))
    assert "".join(d["delta"] for n, d in events if n == "response.reasoning_text.delta") == "hm"
    output = events[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[1]["content"][0]["text"] == "Yes"
    assert events[-1][1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_failure_after_the_start_is_an_error_event(kit: Any) -> None:
    def play(_request: Any, sink: Any, _cancel: Any) -> None:
        sink(kit.report)
        sink(Failed("device lost"))

    kit.backend.script = play
    name, data = kit.named_events(kit.caller().call(PATH, input="Hi", stream=True))[-1]
    assert (name, data["code"], data["message"]) == ("error", "generation_failed", "device lost")


def test_items_become_turns() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "zzz"},
        {"role": "assistant", "content": "c"},
    ]
    assert read(input=items, instructions="i").messages == (
        Message("system", "i"),
        Message("system", "d"),
        Message("user", "a"),
        Message("assistant", "b", None, "hm", (ToolCall("c1", "f", {"x": 1}), ToolCall("c2", "g", {}))),
        Message("tool", "one", "f", tool_call_id="c1"),
        Message("tool", "two", "g", tool_call_id="c2"),
        Message("assistant", "c", None, "so"),
    )


def test_parameters_are_read() -> None:
    asked = read(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        prompt_cache_key="k",
        temperature=None,
    )
    assert asked.toolbox.tools == (Tool("f", "d", {"type": "object"}),)
    assert (asked.toolbox.required, asked.toolbox.parallel, asked.effort) == (True, False, "low")
    assert asked.parameters.sampling.logprobs == 2
    schema = {"type": "object", "properties": {}}
    assert read(text={"format": {"type": "json_schema", "name": "n", "schema": schema}}).schema == schema
    assert read(text={"verbosity": "low"}).schema is None


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "stop": [], "max_tokens": None, "response_format": {"type": "text"}},
        {"store": False, "truncation": "disabled", "background": False, "max_tool_calls": None},
        {"client_metadata": {"x": "y"}, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless) == read()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 1}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"store": True}, "store"),
    ({"previous_response_id": "r"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stop": ["a"]}, "stop"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "name"),
    ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": 1}, "metadata"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}}, "text.format.schema"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL], "tool_choice": "required"}, "text.format"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
