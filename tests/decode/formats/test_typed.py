from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.formats.conversation import Tool
from muser_decode.formats.typed import Kinds, Signatures, kinds_of


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "number"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3.5", {"type": "integer"}, "3.5"),
        ("true", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, "True"),
        ("null", {"type": ["integer", "null"]}, None),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("4", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, 4),
        ("4", {"enum": ["4", "5"]}, "4"),
        ("4", {"enum": [4, 5]}, 4),
        ("4", {"enum": ["a", 4]}, 4),
        ("a", {"enum": ["a", 4]}, "a"),
        ("4.5", {"const": 4.5}, 4.5),
        ("1", {"anyOf": [{"enum": [10]}, {"type": "string"}]}, "1"),
        ("5", {"anyOf": [{"const": 5.5}, {"type": "string"}]}, "5"),
        ("7", {"anyOf": [{"enum": [1, 2]}, {"type": "string"}, {"type": "boolean"}]}, "7"),
        ("1", {"type": "integer", "enum": [1.0]}, 1.0),
        ("[1]", {"type": "string", "allOf": [{"pattern": "a"}]}, "[1]"),
        ("[1]", {"allOf": [{"type": "string"}, {"minLength": 1}]}, "[1]"),
        ("5", {"type": ["string", "string"]}, "5"),
        ("true", {"enum": [True, None]}, True),
        ("4", {"type": "string", "enum": ["4"]}, "4"),
        ("3", {}, "3"),
        ("true", {}, "true"),
        (" [1, 2]", {}, [1, 2]),
        ("[1, 2", {}, "[1, 2"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[" * 50_000, {"type": "array"}, "[" * 50_000),
    ],
)
def test_a_parameter_s_text_gets_the_schema_s_type(text: str, schema: dict[str, Any], value: object) -> None:
    read = kinds_of(schema, {}).from_text(text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("given_value", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (3, {"type": "string"}, "3"),
        (3, {"type": "number"}, 3),
        (True, {"type": "integer"}, True),
        ([1], {"type": "string"}, [1]),
        ("x", {}, "x"),
        (5, {"enum": ["5", 5]}, 5),
        ("5", {"enum": ["5", 5]}, "5"),
        (5.0, {"type": ["integer", "string"]}, 5.0),
        (1, {"enum": [True, "x"]}, "1"),
    ],
)
def test_a_json_value_is_coerced_where_nothing_is_lost(
    given_value: object, schema: dict[str, Any], value: object
) -> None:
    assert kinds_of(schema, {}).coerced(given_value) == value


def test_of_unknown_things_anything_may_be() -> None:
    tools = [Tool("f", "", {"properties": {"a": {"type": "integer"}, "b": True}}), Tool("g", "", {"properties": 3})]
    signatures = Signatures(tools)
    assert signatures.of("f", "a") == Kinds(("integer",), untyped=False)
    for names in (("f", "b"), ("f", "c"), ("g", "a"), ("h", "a")):
        assert signatures.of(*names) == Kinds()
    assert signatures.coerced({"a": "1", "z": "1"}, "f") == {"a": 1, "z": "1"}


def test_an_alternative_of_which_nothing_is_known_leaves_a_value_as_it_is() -> None:
    for other in ({"minimum": 3}, {"allOf": [{"type": "integer"}, {"maximum": 9}]}, True):
        assert kinds_of({"anyOf": [{"type": "string", "enum": ["auto"]}, other]}, {}).coerced(5) == 5


def test_a_text_is_known_to_be_one_when_it_can_be_nothing_else() -> None:
    kinds = kinds_of({"anyOf": [{"type": "string"}, {"const": "north"}, {"type": "null"}]}, {})
    assert [kinds.is_text(begun) for begun in ("", "n", "nu", "nul ", "null", "nullx", "x")] == [
        *(False, False, False, True, False, True, True)
    ]
    assert kinds_of({"type": "string"}, {}).is_text("")
    assert kinds_of({"anyOf": [{"enum": ["a"]}, {"const": "b"}]}, {}).is_text("")
    for schema in ({}, {"type": ["string", "integer"]}, {"enum": ["a", 1]}):
        assert not kinds_of(schema, {}).is_text("x")


def test_references_are_followed_through_alternatives_and_end() -> None:
    definitions = {
        "n": {"anyOf": [{"$ref": "#/$defs/m"}, {"type": "null"}]},
        "m": {"allOf": [{"$ref": "#/$defs/kind"}]},
        "kind": {"enum": [1, 2]},
    }
    properties = {
        "a": {"$ref": "#/$defs/n"},
        "b": {"anyOf": [{"$ref": "#/properties/b"}, {"type": "integer"}]},
        "c": {"anyOf": [{"$ref": "#/properties/c"}]},
    }
    tools = [Tool("f", "", {"properties": properties, "$defs": definitions})]
    assert Signatures(tools).coerced({"a": "1", "b": "1", "c": "1"}, "f") == {"a": 1, "b": 1, "c": "1"}
    assert Signatures(tools).of("f", "a") == Kinds(("null",), (1, 2), untyped=False)
    both = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    doubling = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**both, "60": {"type": "integer"}}}
    assert Signatures([Tool("f", "", doubling)]).of("f", "a").told == ("integer",)


def test_the_root_may_be_a_reference_beside_its_type() -> None:
    definitions = {"args": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    tool = Tool("f", "", {"type": "object", "$ref": "#/definitions/args", "definitions": definitions})
    assert Signatures([tool]).of("f", "a").told == ("integer",)


def test_choices_that_go_a_long_way_to_one_place_are_read_once() -> None:
    """Cubic, this would take minutes."""
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(900)}
    choices = {"anyOf": [{"$ref": "#/$defs/0", "title": str(i)} for i in range(900)]}
    root = {"properties": {"a": choices}, "$defs": {**chain, "900": {"type": "integer"}}}
    assert Signatures([Tool("f", "", root)]).of("f", "a").told == ("integer",)


WORDS = st.sampled_from(["type", "anyOf", "enum", "x"])
SCHEMAS = st.recursive(st.none() | st.text() | st.integers(), lambda s: st.lists(s) | st.dictionaries(WORDS, s))


@given(st.text(), SCHEMAS)
def test_no_schema_breaks_it(text: str, schema: Any) -> None:
    kinds = kinds_of(schema, {})
    kinds.from_text(text)
    kinds.coerced(text)
    kinds.is_text(text)
