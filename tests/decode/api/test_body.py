from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from muser_decode.api.body import parse_object
from muser_decode.api.errors import ApiError
from muser_decode.api.limits import Limits


def refusal(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.reason, caught.value.param) == (400, "invalid_json", None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b' {"a": 1.5, "b": [null, true]} ', {"a": 1.5, "b": [None, True]}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "é😀"}'.encode(), {"a": "é😀"}),
        (rb'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (b'{"a": 1e308}', {"a": 1e308}),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", None),
    ],
)
def test_legal_objects_are_read(body: bytes, value: object) -> None:
    parsed = parse_object(body)
    assert value is None or parsed == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "at character 0"),
        (b"{", "at character 1"),
        (b"null", "not an object"),
        (b"[]", "not an object"),
        (b'"text"', "not an object"),
        (b'{"a": 1} {"b": 2}', "Extra data"),
        (b"{'a': 1}", "at character 1"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [Infinity]}', "Infinity"),
        (b'{"a": {"b": -Infinity}}', "-Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": -1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (rb'{"a": "\ud800"}', "lone surrogate"),
        (rb'{"a": [{"b": "x\udfffy"}]}', "lone surrogate"),
        (rb'{"\ud83d": 1}', "lone surrogate"),
        (rb'{"a": "\ude00\ud83d"}', "lone surrogate"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": "\xc3"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\x00"}', "control character"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_other_bodies_are_refused_with_a_reason(body: bytes, why: str) -> None:
    assert why in refusal(body)


def test_a_refusal_does_not_repeat_the_body() -> None:
    assert "secret" not in refusal(b'{"secret": "\xff secret"}')


GOOD = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "Application/JSON"},
        {"content-type": "application/vnd.chat+json"},
        {"content-type": "application/json", "content-encoding": "identity"},
    ],
)
def test_json_is_taken_under_its_names_and_without_one(kit: Any, headers: dict[str, str]) -> None:
    assert kit.caller().post(GOOD, headers).status_code == 200


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "json", "text/json+x"])
def test_another_content_type_is_refused(kit: Any, media_type: str) -> None:
    response = kit.caller().post(GOOD, {"content-type": media_type})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_compressed_body_is_refused(kit: Any) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = kit.caller().post(gzip.compress(GOOD), headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_a_body_that_outgrows_its_declared_length_is_cut_off(kit: Any) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    caller = kit.caller(Limits(max_body_nbytes=5000))
    response = caller.request(
        "POST", "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
