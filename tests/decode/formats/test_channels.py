from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from read_deltas import called, together

from muser_decode.formats.channels import ChannelParser
from muser_decode.formats.conversation import Call, CallPart, CallStart, Content, Delta, Reasoning, Tool

TOOL = Tool(
    "lookup",
    "d",
    {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "where": {"type": "object"},
            "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        }
    },
)
START, MESSAGE, EOM, EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
CONTROLS = {START, MESSAGE, EOM, EOT}


def read(pieces: list[str]) -> list[Any]:
    """What the pieces are read as; a piece that is a control token's spelling is that token."""
    parser = ChannelParser([TOOL])
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.control(piece) if piece in CONTROLS else parser.feed(piece)
    return together([*deltas, *parser.finish()])


def call(*parameters: tuple[str, str], end: str = "</atem:invoke></atem:function_calls>") -> str:
    body = "".join(f'<atem:parameter name="{name}">{value}</atem:parameter>\n' for name, value in parameters)
    return f'<atem:function_calls>\n<atem:invoke name="lookup">\n{body}{end}'


def test_reasoning_then_the_answer() -> None:
    pieces = [" to=self", MESSAGE, "hm", EOM, START, "assistant to=user", MESSAGE, "Yes", EOT]
    assert read(pieces) == [Reasoning("hm"), Content("Yes")]


def test_reasoning_then_a_call_with_typed_arguments() -> None:
    body = call(("text", "3"), ("count", "3"), ("where", '{"a": [1]}'), ("maybe", "null"), ("other", "7"))
    pieces = [" to=self", MESSAGE, "hm", EOM, START, "assistant to=lookup", MESSAGE, body, EOT]
    arguments = {"text": "3", "count": 3, "where": {"a": [1]}, "maybe": None, "other": "7"}
    assert read(pieces) == [Reasoning("hm"), called("lookup", arguments)]


def test_texts_keep_their_lines_and_angle_brackets() -> None:
    body = call(("text", "\n<a>\n </atem:invoke> x\n"))
    assert read([" to=lookup", MESSAGE, body]) == [called("lookup", {"text": "\n<a>\n </atem:invoke> x\n"})]


def test_several_calls_in_a_message_and_in_several() -> None:
    two = '<atem:invoke name="a"></atem:invoke><atem:invoke name="b"></atem:invoke>'
    one = '<atem:invoke name="c"></atem:invoke>'
    pieces = [" to=a", MESSAGE, two, EOM, START, "assistant to=c", MESSAGE, one, EOT]
    assert read(pieces) == [called("a", {}), called("b", {}), called("c", {})]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([" to=self", MESSAGE, "cut"], [Reasoning("cut")]),
        ([" to=user", MESSAGE, "cut"], [Content("cut")]),
        ([" to=look"], []),
        ([MESSAGE, "no recipient"], [Content("no recipient")]),
        ([" to=user", MESSAGE, call(("text", "x"))], [Content(call(("text", "x")))]),
        (["Just text."], [Content("Just text.")]),
        (["assistant", "ship"], [Content("assistantship")]),
        ([" to=user", MESSAGE, "a <|eom|> b", EOT], [Content("a <|eom|> b")]),
        ([EOT], []),
        ([" to=lookup", MESSAGE, "no call"], [Content("no call")]),
        ([" to=lookup", MESSAGE, '<atem:invoke name="look'], [Content('<atem:invoke name="look')]),
        ([" to=lookup", MESSAGE, call(("count", "x"), end="")], [Call("lookup", {}, '{"count": "x"')]),
        (
            [" to=lookup", MESSAGE, call(("text", "x"), end='<atem:parameter name="count">3')],
            [Call("lookup", {}, '{"text": "x", "count": ')],
        ),
        (
            [" to=lookup", MESSAGE, call(end='<atem:parameter name="text">a\n</atem:pa')],
            [Call("lookup", {}, '{"text": "a\\n</atem:pa')],
        ),
        ([" to=lookup", MESSAGE, call(("count", "1"), end=" and</atem:invoke>")], [called("lookup", {"count": 1})]),
        ([" to=user", MESSAGE, "a", EOM, "b"], [Content("ab")]),
        ([" to=" + "x" * 300], [Content(" to=" + "x" * 300)]),
    ],
)
def test_what_is_cut_off_or_malformed(pieces: list[str], expected: list[Any]) -> None:
    assert read(pieces) == expected


def test_calls_before_the_cut_count() -> None:
    body = '<atem:invoke name="a"></atem:invoke><atem:invoke name="b"><atem:parameter name="x">1'
    assert read([" to=a", MESSAGE, body]) == [called("a", {}), Call("b", {}, '{"x": ')]


def test_arguments_are_told_as_they_come() -> None:
    parser = ChannelParser([TOOL])
    parser.feed(" to=lookup")
    parser.control(MESSAGE)
    assert parser.feed('<atem:function_calls>\n<atem:invoke name="lookup') == []
    assert parser.feed('"><atem:parameter name="te') == [CallStart("lookup"), CallPart("{")]
    assert parser.feed('xt">one "two" </atem') == [CallPart('"text": "one \\"two\\" ')]
    assert parser.feed(":other> three</atem:parameter>") == [CallPart('</atem:other> three"')]
    assert parser.feed('<atem:parameter name="where">{"a": ') == [CallPart(', "where": ')]
    assert parser.feed("[1]}</atem:parameter>") == [CallPart('{"a": [1]}')]
    (part, call) = parser.feed("</atem:invoke>")
    assert (part, call) == (
        CallPart("}"),
        called("lookup", {"text": 'one "two" </atem:other> three', "where": {"a": [1]}}),
    )
    assert parser.control(EOT) == []


PARTS = st.sampled_from(
    [START, MESSAGE, EOM, EOT, " to=self", " to=user", "assistant to=lookup", "assistant", "a", " ", "\n", "<atem:",
     call(("count", "5")), '<atem:invoke name="f">', "</atem:invoke>", '<atem:parameter name="p">', "</atem:parameter>"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=14))
def test_any_split_reads_the_same(parts: list[str]) -> None:
    cut = [piece for part in parts for piece in ([part] if part in CONTROLS else list(part))]
    merged: list[str] = []
    for part in parts:
        if merged and part not in CONTROLS and merged[-1] not in CONTROLS:
            merged[-1] += part
        else:
            merged.append(part)
    assert read(parts) == read(cut) == read(merged)


@given(st.lists(st.one_of(st.sampled_from(sorted(CONTROLS)), st.text()), max_size=6))
def test_any_text_is_read(pieces: list[str]) -> None:
    assert all(isinstance(delta, Content | Reasoning | Call) for delta in read(pieces))
