from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.formats.conversation import Call, CallPart, CallStart, Tool
from muser_decode.formats.streamed import JsonCall, head_at_end, mended, read_object

TOOL = Tool("f", "", {"properties": {"n": {"type": "integer"}, "t": {"type": "string"}, "o": {"type": "object"}}})


def text_of(body: str) -> str:
    """The arguments that the reader tells, fed one character at a time."""
    reader = JsonCall([TOOL])
    deltas = [delta for end in range(1, len(body) + 1) for delta in reader.read(body[:end])]
    assert "".join(delta.text for delta in deltas if isinstance(delta, CallPart)) == reader.end().text
    return reader.end().text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"n": "7", "t": 7, "x": "7"}', '{"n": 7, "t": "7", "x": "7"}'),
        ('{"n": "seven"}', '{"n": "seven"}'),
        ('{"o": {"n": "7"}, "n": 7}', '{"o": {"n": "7"}, "n": 7}'),
        ("{ }", "{}"),
        ('{"a":[],"b":[{}, [1 ,2]]}', '{"a": [], "b": [{}, [1, 2]]}'),
        ('{"a": "\\u00e9\\ud83d\\ude00\\"\\\\"}', '{"a": "é😀\\"\\\\"}'),
        ('{"a": "\\ud83d\\n\\ude00"}', '{"a": "\ufffd\\n\ufffd"}'),
    ],
)
def test_arguments_are_rewritten_and_coerced(arguments: str, told: str) -> None:
    assert text_of(f'{{"name": "f", "arguments": {arguments}}}') == told
    assert json.loads(told) == read_object(told)


def test_a_body_of_another_kind_tells_nothing_before_its_end() -> None:
    for body in ('{"arguments": {}, "name": "f"}', '{"name": "f", "arguments": "{}"}', '{"name": "f"}', "[1]", ""):
        reader = JsonCall([TOOL])
        assert (reader.read(body), reader.begun) == ([], False)


def test_what_comes_after_the_arguments_does_not_count() -> None:
    reader = JsonCall([TOOL])
    assert reader.read('{"name": "f", "arguments": {"n": 1}, "arguments": {"n": 2}}') == [
        CallStart("f"),
        CallPart('{"n": 1}'),
    ]
    assert reader.end() == Call("f", {"n": 1}, '{"n": 1}')


@given(st.text(), st.text())
def test_any_body_is_taken_and_what_is_told_can_be_sent(head: str, tail: str) -> None:
    for body in (head, f'{{"name": "f", "arguments": {{{head}"{tail}'):
        text_of(body).encode()


@pytest.mark.parametrize(("text", "tag", "length"), [("a <thi", "<think>", 4), ("a <b", "<think>", 0), ("", "x", 0)])
def test_the_end_that_begins_a_tag(text: str, tag: str, length: int) -> None:
    assert head_at_end(text, tag) == length


def test_half_of_a_pair_is_no_character() -> None:
    whole: Any = "a\ud83d\ude00b"
    assert (mended("a\ud800b"), mended(whole)) == ("a\ufffdb", "a😀b")
    assert read_object("[1]") == read_object("{") == {}
