"""Every endpoint that takes a body, against bodies that nobody can read: refusals, and the next call works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from muser_decode.api.limits import MAX_DEPTH, Limits
from muser_decode.api.openapi import OPERATIONS

PATHS = [operation.path for operation in OPERATIONS if operation.body is not None]

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
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
