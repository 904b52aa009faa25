from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.formats.chatml_hermes import TAGS
from muser_decode.formats.conversation import Call, Content, Delta, Reasoning, Tool
from muser_decode.formats.gemma import TAGS as FENCE
from muser_decode.formats.tagged import CallTags, TaggedParser

WEATHER = Tool("weather", "d", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring pieces of one kind as one."""
    whole: list[Delta] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        if not isinstance(delta, Call) and last is not None and type(last) is type(delta):
            whole[-1] = type(delta)(last.text + delta.text)  # type: ignore[union-attr]
        else:
            whole.append(delta)
    return whole


def read(pieces: list[str], tags: CallTags = TAGS, *, tools: bool = True, opened: bool = False) -> list[Delta]:
    parser = TaggedParser([WEATHER] if tools else [], tags, thinks=True, opened=opened)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined(deltas + parser.finish())


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": "3"}}\n</tool_call>'
OSLO = Call("weather", {"city": "Oslo", "days": 3})


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
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [Call("f", {})]),
        ("<tool_call>[1]</tool_call>", [Content("<tool_call>[1]</tool_call>")]),
        ('<tool_call>{"name": 1}</tool_call>', [Content('<tool_call>{"name": 1}</tool_call>')]),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ("  trailing  ", [Content("  trailing  ")]),
        ("", []),
    ],
)
def test_what_an_answer_is_read_as(text: str, expected: list[Delta] | None) -> None:
    assert read([text]) == ([Content(text)] if expected is None else expected)


def test_a_prompt_that_opened_the_reasoning() -> None:
    assert read(["hm</think>\nYes"], opened=True) == [Reasoning("hm"), Content("Yes")]


def test_without_tools_their_tags_are_text() -> None:
    assert read([CALL], tools=False) == [Content(CALL)]


def test_tags_that_are_control_tokens_are_read_too() -> None:
    parser = TaggedParser([WEATHER], TAGS, thinks=True, opened=False)
    deltas = parser.control("<tool_call>") + parser.feed('{"name": "weather"}') + parser.control("</tool_call>")
    assert deltas == [Call("weather", {})]
    assert parser.control("<|im_end|>") == []


def test_gemma_s_fence() -> None:
    text = '```tool_call\n{"name": "weather", "arguments": {"days": 2}}\n```'
    assert read([text], FENCE) == [Call("weather", {"days": 2})]
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
