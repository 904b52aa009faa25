"""Every endpoint that takes a body, against bodies that nobody can read: refusals, and the next call works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muser_decode.api import completions, messages_request, responses_request, schemas
from muser_decode.api.limits import MAX_DEPTH, Limits
from muser_decode.api.openapi import OPERATIONS
from muser_decode.api.parameters import HARMLESS

PATHS = [operation.path for operation in OPERATIONS if operation.body is not None]

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
    "/explain-cache": {"tokens": [65]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
}

NESTED = b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2)
BODIES: list[tuple[str, bytes, int]] = [
    ("empty", b"", 400),
    ("cut off", b'{"model"', 400),
    ("not an object", b"[]", 400),
    ("a string", b'"x"', 400),
    ("NaN", b'{"temperature": NaN}', 400),
    ("infinity", b'{"temperature": -Infinity}', 400),
    ("an infinite number", b'{"temperature": 1e999}', 400),
    ("a number of many digits", b'{"seed": ' + b"9" * 5000 + b"}", 400),
    ("a lone surrogate", b'{"prompt": "\\ud800"}', 400),
    ("a lone surrogate in a name", b'{"\\udfff": 1}', 400),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', 400),
    ("UTF-16", '{"prompt": "x"}'.encode("utf-16"), 400),
    ("nested arrays", b'{"x": ' + NESTED + b"}", 400),
    ("nested without end", b'{"x":' * 100_000, 400),
    ("10 MB", b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
]


def message_of(path: str, response: Any) -> str:
    """The message of either error shape."""
    body = response.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def test_every_endpoint_with_a_body_is_here() -> None:
    assert set(PATHS) == set(GOOD)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("body", "status"), [case[1:] for case in BODIES], ids=[case[0] for case in BODIES])
def test_an_unreadable_body_is_refused_and_the_next_request_works(
    kit: Any, path: str, body: bytes, status: int
) -> None:
    caller = kit.caller()
    response = caller.request("POST", path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert message_of(path, response)
    assert caller.call(path, **GOOD[path]).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_other_types_and_encodings_are_refused(kit: Any, path: str) -> None:
    caller = kit.caller()
    body = json.dumps({"model": "tiny", **GOOD[path]}).encode()
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
        response = caller.request("POST", path, content=body, headers=headers)
        assert response.status_code == 415
        assert message_of(path, response)


@pytest.mark.parametrize("path", PATHS)
def test_null_is_the_default_everywhere(kit: Any, path: str) -> None:
    names = "temperature top_p top_k stream stop tools tool_choice user metadata seed text reasoning system thinking"
    nulls = {name: None for name in names.split() if name not in GOOD[path]}
    assert kit.caller().call(path, **nulls, **GOOD[path], unknown_field={"a": [1]}).status_code == 200


ANSWERING: dict[str, frozenset[str]] = {
    "/v1/chat/completions": schemas.READ,
    "/v1/completions": completions.READ,
    "/v1/responses": responses_request.READ,
    "/v1/messages": messages_request.READ,
    "/v1/messages/count_tokens": messages_request.READ,
}


_MESSAGES = {"output_config", "thinking"}
OBJECTS: dict[str, set[str]] = {
    "/v1/chat/completions": {"stream_options"},
    "/v1/completions": {"stream_options"},
    "/v1/responses": {"reasoning", "text"},
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
}
"""Fields that are objects, in which an unknown member is ignored."""


@pytest.mark.parametrize("path", ANSWERING)
def test_a_field_that_another_endpoint_knows_is_refused_by_name(kit: Any, path: str) -> None:
    """No value of the wrong type is one that asks for nothing, so each field is either read or refused."""
    caller = kit.caller()
    for name, harmless in HARMLESS.items():
        for wrong in ({"\u0000": 1}, [{"\u0000": 1}]):
            response = caller.call(path, **{**GOOD[path], name: wrong})
            assert response.status_code == 400 or (type(wrong) is dict and name in OBJECTS[path]), name
            assert name in ANSWERING[path] or name in message_of(path, response)
        for value in (*harmless, None) if name not in ANSWERING[path] else ():
            assert caller.call(path, **{**GOOD[path], name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "only the system speaks"}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
            }
        ],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "\x00\u202e\U0010ffff"}],
        [{"role": "user", "content": "x"}] * 300,
    ],
    ids=["system alone", "a call alone", "empty", "odd characters", "many"],
)
def test_odd_conversations_are_answered(kit: Any, messages: list[dict[str, Any]]) -> None:
    kit.backend.context_tokens = 100_000
    response = kit.caller(Limits()).call("/v1/chat/completions", messages=messages, max_tokens=2**62)
    assert response.status_code == 200


USER = {"role": "user", "content": "x"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}],
}
NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    ("no messages", {"messages": []}, "messages", "invalid_value"),
    ("null messages", {"messages": None}, "messages", "missing_required_parameter"),
    ("messages of another type", {"messages": "x"}, "messages", "invalid_type"),
    ("no parts", {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value"),
    (
        "an unknown part",
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        "a picture",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    ("broken arguments", {"messages": [CALLED]}, "messages[0].tool_calls[0].function.arguments", "invalid_value"),
    ("too many messages", {"messages": [USER] * 8193}, "messages", "invalid_value"),
    ("zero tokens", {"max_tokens": 0}, "max_tokens", "invalid_value"),
    ("fewer than none", {"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
    ("more than any", {"max_tokens": 2**63}, "max_tokens", "invalid_value"),
    ("no answers", {"n": 0}, "n", "invalid_value"),
    ("too many answers", {"n": 1000}, "n", "invalid_value"),
    ("a bias too strong", {"logit_bias": {"1": 100.5}}, "logit_bias.1", "invalid_value"),
    ("a bias of a token that is not there", {"logit_bias": {"259": 1}}, "logit_bias", "invalid_value"),
    ("a stop token that is not there", {"stop_token_ids": [5000]}, "stop_token_ids", "invalid_value"),
    ("a temperature in words", {"temperature": "hot"}, "temperature", "invalid_type"),
    ("a negative temperature", {"temperature": -1}, "temperature", "invalid_value"),
    ("a flag that is a number", {"stream": 1}, "stream", "invalid_type"),
    ("another model", {"model": "other"}, "model", "model_not_found"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("body", "param", "code"), [case[1:] for case in NAMED], ids=[case[0] for case in NAMED])
def test_a_bad_field_is_named_and_the_next_request_works(
    kit: Any, body: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    caller = kit.caller()
    response = caller.call("/v1/chat/completions", **{"messages": [USER], "stream": stream, **body})
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]
    assert kit.backend.requests == []
    assert caller.call("/v1/chat/completions", messages=[USER], stream=stream).status_code == 200
