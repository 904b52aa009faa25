from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_deltas import called, together

from muser_decode.formats.chatml_hermes import TAGS
from muser_decode.formats.conversation import Call, CallPart, CallStart, Content, Reasoning, Tool
from muser_decode.formats.gemma import TAGS as FENCE
from muser_decode.formats.tagged import CallTags, TaggedParser

WEATHER = Tool("weather", "d", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})


def read(pieces: list[str], tags: CallTags = TAGS, *, tools: bool = True, opened: bool = False) -> list[Any]:
    parser = TaggedParser([WEATHER] if tools else [], tags, thinks=True, opened=opened)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return together(deltas + parser.finish())


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": "3"}}\n</tool_call>'
OSLO = called("weather", {"city": "Oslo", "days": 3})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello", [Content("Hello")]),
        ("<think>\nhm\n</think>\n\nHello", [Reasoning("hm"), Content("Hello")]),
        (" \n<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("say <think>a</think>", [Content("say <think>a</think>")]),
        ("<think></think>x", [Content("x")]),
        ("<think>cut <tool_call>", [Reasoning("cut <tool_call>")]),
        ("<think>cut </thi", [Reasoning("cut </thi")]),
        (CALL, [OSLO]),
        (f"Let me look.\n{CALL}\n{CALL}\n", [Content("Let me look."), OSLO, OSLO]),
        (f"<think>a</think>\n{CALL}", [Reasoning("a"), OSLO]),
        ("a <tool_call>not json</tool_call> b", [Content("a<tool_call>not json</tool_call> b")]),
        ('<tool_call>{"name": "weath', [Content('<tool_call>{"name": "weath')]),
        ("1 < 2 <tool", [Content("1 < 2 <tool")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [called("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [called("f", {})]),
        ("<tool_call>[1]</tool_call>", [Content("<tool_call>[1]</tool_call>")]),
        ('<tool_call>{"name": 1}</tool_call>', [Content('<tool_call>{"name": 1}</tool_call>')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}, "x": 1}</tool_call>', [called("f", {"a": "\ufffd"})]),
        ('<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>', None),
        ('<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ("  trailing  ", [Content("  trailing  ")]),
        ("", []),
    ],
)
def test_what_an_answer_is_read_as(text: str, expected: list[Any] | None) -> None:
    assert read([text]) == ([Content(text)] if expected is None else expected)


def test_a_prompt_that_opened_the_reasoning() -> None:
    assert read(["hm</think>\nYes"], opened=True) == [Reasoning("hm"), Content("Yes")]


def test_without_tools_their_tags_are_text() -> None:
    assert read([CALL], tools=False) == [Content(CALL)]


def test_tags_that_are_control_tokens_are_read_too() -> None:
    parser = TaggedParser([WEATHER], TAGS, thinks=True, opened=False)
    deltas = parser.control("<tool_call>") + parser.feed('{"name": "weather"}') + parser.control("</tool_call>")
    assert together(deltas) == [called("weather", {})]
    assert parser.control("<|im_end|>") == []


def test_gemma_s_fence() -> None:
    text = '```tool_call\n{"name": "weather", "arguments": {"days": 2}}\n```'
    assert read([text], FENCE) == [called("weather", {"days": 2})]
    assert read(["```python\nx\n```"], FENCE) == [Content("```python\nx\n```")]


def test_what_is_not_shown_is_counted() -> None:
    parser = TaggedParser([WEATHER], TAGS, thinks=False, opened=False)
    assert parser.feed("ab <tool") == [Content("ab")]
    assert parser.held == len(" <tool")


PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        "a",
        " ",
        "\n",
        "<",
        '{"name": "f"}',
        "</",
        "tool",
        "é",
    ]
)


@given(st.lists(PARTS, max_size=12).map("".join), st.data(), st.booleans(), st.booleans())
def test_any_split_reads_the_same(text: str, data: st.DataObject, tools: bool, opened: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = read([text], tools=tools, opened=opened)
    assert read(pieces, tools=tools, opened=opened) == whole
    assert read(list(text), tools=tools, opened=opened) == whole


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert all(isinstance(delta, Content | Reasoning | Call) for delta in read([text]))


def test_arguments_are_told_as_they_come() -> None:
    parser = TaggedParser([WEATHER], TAGS, thinks=False, opened=False)
    assert parser.feed('<tool_call>\n{"name": "weather", "arg') == []
    assert parser.feed('uments": {"ci') == [CallStart("weather"), CallPart("{")]
    assert parser.feed('ty" : "New') == [CallPart('"city": "New')]
    assert parser.feed(" York\\u00e9") == [CallPart(" Yorké")]
    # A number is whole when something else follows, and one that is to be a number is no string.
    assert parser.feed('","days": "1') == [CallPart('", "days": ')]
    assert parser.feed('2"') == [CallPart("12")]
    assert parser.feed("}}\n</tool") == [CallPart("}")]
    assert parser.feed("_call> x") == [
        Call("weather", {"city": "New Yorké", "days": 12}, '{"city": "New Yorké", "days": 12}'),
        Content(" x"),
    ]


@pytest.mark.parametrize(
    ("body", "text", "arguments"),
    [
        ('{"city": "Os', '{"city": "Os', {}),
        ('{"city": "Oslo"</tool_call>', '{"city": "Oslo"', {}),
        ('{"a": NaN}}</tool_call>', '{"a": NaN}', {}),
        ('{"a": tru', '{"a": ', {}),
        # The last brace was forgotten.
        ('{"a": true}</tool_call>', '{"a": true}', {"a": True}),
        ('{"a": "\n\t"}}</tool_call>', '{"a": "\\n\\t"}', {"a": "\n\t"}),
        (
            '{"a": [1,{"b":1e2}], "c": null}}</tool_call>',
            '{"a": [1, {"b": 100.0}], "c": null}',
            {"a": [1, {"b": 100.0}], "c": None},
        ),
        ('{"a": "\\ud83d\\ude00\\/\\ud83d"}}</tool_call>', '{"a": "😀/\ufffd"}', {"a": "😀/\ufffd"}),
    ],
)
def test_arguments_that_were_begun_are_a_call_however_they_end(body: str, text: str, arguments: dict[str, Any]) -> None:
    for pieces in (
        [f'<tool_call>{{"name": "f", "arguments": {body}'],
        ['<tool_call>{"name": "f", "arguments": ', *body],
    ):
        assert read(pieces) == [Call("f", arguments, text)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_any_arguments_come_out_as_python_writes_them(
    arguments: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    text = f"<tool_call>{body}</tool_call>"
    if "</tool_call>" not in body:
        assert read([text]) == read(list(text)) == [called("f", arguments)]
