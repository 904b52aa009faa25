from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from read_deltas import called, together

from muser_decode.formats.conversation import Call, Tool
from muser_decode.formats.invoked import InvokedCalls

TOOL = Tool("f", "", {"properties": {"t": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "array"}}})


def read(*pieces: str) -> tuple[list[object], bool]:
    reader = InvokedCalls([TOOL])
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return list(together([*deltas, *reader.end()])), reader.begun


def parameter(name: str, value: str) -> str:
    return f'<atem:parameter name="{name}">{value}</atem:parameter>'


def test_arguments_have_the_types_of_the_schema() -> None:
    body = f'<atem:invoke name="f">{parameter("t", "3")}\n{parameter("n", "3")} {parameter("o", "[1]")}</atem:invoke>'
    assert read(body) == ([called("f", {"t": "3", "n": 3, "o": [1]})], True)
    assert read(*body) == read(body)


def test_a_value_that_no_client_could_be_sent_is_mended() -> None:
    value = parameter("o", '["\\ud800"]')
    ((call,), _) = read(f'<atem:invoke name="f">{value}</atem:invoke>')
    assert isinstance(call, Call)
    assert (call.arguments, call.text.encode()) == ({"o": ["\ufffd"]}, '{"o": ["\ufffd"]}'.encode())


def test_a_body_without_a_call_tells_nothing() -> None:
    assert read("free text </atem:invoke> <atem:parameter name='x'>") == ([], False)


@given(st.dictionaries(st.sampled_from("tuvw"), st.text(alphabet=st.characters(codec="utf-8")), max_size=3))
def test_texts_come_out_as_they_are(arguments: dict[str, str]) -> None:
    texts = {name: value for name, value in arguments.items() if "</atem:" not in value}
    tool = Tool("f", "", {"properties": {name: {"type": "string"} for name in texts}})
    body = f'<atem:invoke name="f">{"".join(parameter(*item) for item in texts.items())}</atem:invoke>'
    reader = InvokedCalls([tool])
    deltas = [delta for piece in body for delta in reader.feed(piece)]
    assert together(deltas) == [called("f", texts)]
    assert json.loads(deltas[-1].text) == texts  # type: ignore[union-attr]
