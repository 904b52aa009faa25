from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from muser_decode.engine.request import FinishReason, Likelihood, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from muser_decode.engine.request import EventSink, GenerationRequest

PATH = "/v1/completions"


def test_a_text_is_continued(kit: Any) -> None:
    response = kit.caller().call(PATH, prompt="Say", temperature=0, seed=3)
    body = response.json()
    assert response.headers["x-muser-route"] == "remote"
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 5)
    (asked,) = kit.backend.requests
    assert asked.prompt_ids == tuple(b"Say")
    # OpenAI's default of this endpoint.
    assert asked.max_new_tokens == 16
    assert asked.sampling == SamplingParams(temperature=0.0, seed=3)


def test_control_tokens_come_from_ids_alone(kit: Any) -> None:
    kit.caller().call(PATH, prompt="<|im_end|>")
    kit.caller().call(PATH, prompt=[258, 65])
    assert [request.prompt_ids for request in kit.backend.requests] == [tuple(b"<|im_end|>"), (258, 65)]


@pytest.mark.parametrize(("begins", "first"), [(None, 256), (True, 256), (False, 65)])
def test_a_text_begins_as_the_model_wants_it(kit: Any, begins: bool | None, first: int) -> None:
    kit.backend.tokenizer.adds_bos = True
    kit.caller().call(PATH, prompt="A", add_special_tokens=begins)
    assert kit.backend.requests[0].prompt_ids[0] == first


def test_several_prompts_with_several_answers(kit: Any) -> None:
    kit.backend.script = lambda request, sink, cancel: kit.saying(f"{len(request.prompt_ids)}{request.sampling.seed}")(
        request, sink, cancel
    )
    body = kit.caller().call(PATH, prompt=["a", [66, 67]], n=2, seed=5).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (texts[0], texts[2]) == ("15", "25")
    assert texts[1].startswith("1")
    assert texts[1][1:] == texts[3][1:] != "5"
    assert body["usage"]["prompt_tokens"] == 3
    assert len({request.request_id for request in kit.backend.requests}) == 4


def test_a_stream_is_the_same_text(kit: Any) -> None:
    response = kit.caller().call(PATH, prompt="Say", stream=True, stream_options={"include_usage": True})
    events = kit.sse(response)
    assert events[-1] == "[DONE]"
    assert (events[-2]["choices"], events[-2]["usage"]["total_tokens"]) == ([], 8)
    assert "".join(event["choices"][0]["text"] for event in events[:-2]) == "Hello"
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None] * 5 + ["stop"]
    assert events[-3]["muser"]["route"] == "remote"
    assert [event["usage"] for event in events[:-2]] == [None] * 6
    silent = kit.sse(kit.caller().call(PATH, prompt="Say", stream=True, stream_options={"include_usage": False}))
    assert not any("usage" in event for event in silent[:-1])


def test_likelihoods_in_the_old_shape(kit: Any) -> None:
    def play(_request: GenerationRequest, sink: EventSink, _cancel: Any) -> None:
        sink(kit.report)
        for byte in "aé".encode():
            sink(TokenEvent(byte, Likelihood(-0.5, ((byte, -0.5), (258, float("-inf"))))))
        kit.saying("", FinishReason.LENGTH, None)(_request, sink, _cancel)

    kit.backend.script = play
    whole = kit.caller().call(PATH, prompt="x", logprobs=2).json()["choices"][0]
    assert kit.backend.requests[0].sampling.logprobs == 2
    assert whole["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5, "<|im_end|>": -9999.0}] + [{"\ufffd": -0.5, "<|im_end|>": -9999.0}] * 2,
        "text_offset": [0, 1, 1],
    }
    events = kit.sse(kit.caller().call(PATH, prompt="x", logprobs=2, stream=True))
    parts = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1]


def test_the_old_shape_tells_the_token_that_was_taken_beside_the_likeliest(kit: Any) -> None:
    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        sink(kit.report)
        likeliest = ((98, -0.25),) if request.sampling.logprobs else ()
        sink(TokenEvent(97, Likelihood(-2.0, likeliest)))
        kit.saying("", FinishReason.LENGTH, None)(request, sink, cancel)

    kit.backend.script = play
    for asked, told in ((1, {"b": -0.25, "a": -2.0}), (0, {"a": -2.0})):
        choice = kit.caller().call(PATH, prompt="x", logprobs=asked).json()["choices"][0]
        assert choice["logprobs"]["top_logprobs"] == [told]


@pytest.mark.parametrize(
    "harmless",
    [
        {"echo": False, "suffix": "", "best_of": 1, "n": 1, "logprobs": None},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "top_logprobs": 0},
        {"response_format": {"type": "text"}, "reasoning_effort": None, "user": "u", "anything": "goes"},
    ],
)
def test_values_that_ask_for_nothing_are_taken(kit: Any, harmless: dict[str, Any]) -> None:
    assert kit.caller().call(PATH, prompt="a", **harmless).status_code == 200


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing_required_parameter"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": 1}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", [True]]}, "prompt[1]", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": [259]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [10**30]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 9}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 3, "n": 3}, "prompt", "invalid_value"),
    ({"prompt": "a", "echo": True}, "echo", "unsupported_parameter"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
    (
        {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        "tool_choice",
        "unsupported_parameter",
    ),
    ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"prompt": "a", "top_logprobs": 2}, "top_logprobs", "unsupported_parameter"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs", "unsupported_parameter"),
    ({"prompt": "a", "max_output_tokens": 2}, "max_output_tokens", "unsupported_parameter"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": "a", "logit_bias": {"259": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "a", "stop_token_ids": [259]}, "stop_token_ids", "invalid_value"),
    ({"prompt": "a" * 5000}, "messages", "context_length_exceeded"),
]


@pytest.mark.parametrize(("body", "param", "reason"), BAD)
def test_a_bad_body_is_refused_by_name(kit: Any, body: dict[str, Any], param: str, reason: str) -> None:
    response = kit.caller().call(PATH, **body)
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (reason, param)
    assert kit.backend.requests == []


def test_another_model_is_not_found(kit: Any) -> None:
    assert kit.caller().call(PATH, model="x", prompt="a").status_code == 404
