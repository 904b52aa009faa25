from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.formats.conversation import Tool
from muser_decode.formats.typed import coerced, coerced_arguments, from_text, schema_of


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
    read = from_text(text, schema)
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
    ],
)
def test_a_json_value_is_coerced_where_nothing_is_lost(
    given_value: object, schema: dict[str, Any], value: object
) -> None:
    assert coerced(given_value, schema) == value


def test_schemas_of_unknown_things_are_empty() -> None:
    tools = [Tool("f", "", {"properties": {"a": {"type": "integer"}, "b": True}}), Tool("g", "", {"properties": 3})]
    assert schema_of(tools, "f", "a") == {"type": "integer"}
    assert [schema_of(tools, *names) for names in (("f", "b"), ("f", "c"), ("g", "a"), ("h", "a"))] == [{}] * 4
    assert coerced_arguments({"a": "1", "z": "1"}, tools, "f") == {"a": 1, "z": "1"}


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
    assert coerced_arguments({"a": "1", "b": "1", "c": "1"}, tools, "f") == {"a": 1, "b": 1, "c": "1"}
    assert schema_of(tools, "f", "a") == {"anyOf": [{"enum": [1, 2]}, {"type": "null"}]}
    both = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}
    doubling = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**both, "60": {"type": "integer"}}}
    assert schema_of([Tool("f", "", doubling)], "f", "a") == {"type": "integer"}


WORDS = st.sampled_from(["type", "anyOf", "enum", "x"])
SCHEMAS = st.recursive(st.none() | st.text() | st.integers(), lambda s: st.lists(s) | st.dictionaries(WORDS, s))


@given(st.text(), SCHEMAS)
def test_no_schema_breaks_it(text: str, schema: Any) -> None:
    from_text(text, schema if isinstance(schema, dict) else {"type": schema})
