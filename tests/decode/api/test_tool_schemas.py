"""Schemas of tools as agents send them: what is followed, what is refused, what is free instead."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from local_backend import LocalBackend, local_backend

from muser_decode.formats.muse import Muse
from muser_wire.model.tiny import write_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

FAR = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"], "additionalProperties": False}
HERMES = "{% for one in messages + (tools or []) %}{{ one.content or one.function.name }}{% endfor %}"
ENDS = ("<|eom|>", "<|eot|>")
DEPTH = 24


@pytest.fixture(scope="module", params=["llama", "muse_glimmer"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    """A node of the first format, whose arguments are JSON, or of the third."""
    path: Path = tmp_path_factory.mktemp("models") / request.param
    write_tiny(request.param, path)
    with local_backend(path) as backend:
        yield backend


@pytest.fixture
def ask(kit: Any, backend: LocalBackend) -> Callable[..., httpx.Response]:
    special = backend.tokenizer.special_ids
    # The tools are named only: their schemas are longer than the context.
    muse = Muse().template.replace("tool.function | tojson", "tool.function.name")
    caller = kit.caller(other=backend, template=muse if "<|start|>" in special else HERMES)
    # Random weights end a text that may go on for ever seldom: they are asked to.
    bias = {str(special[end]): 30 for end in ENDS if end in special}

    def ask(*tools: dict[str, Any], **more: Any) -> httpx.Response:
        response: httpx.Response = caller.chat(tools=list(tools), logit_bias=bias, seed=3, **more)
        return response

    return ask


def tool(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def arguments(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


def with_property(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False, **more}


def doubling(depth: int) -> dict[str, Any]:
    """Definitions of which each refers twice to the next."""
    both = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(depth)}
    return {**both, str(depth): {"type": "integer", "minimum": 1, "maximum": 9}}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        (with_property({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"enum": [3, 5]}}}), [{"a": 3}, {"a": 5}]),
        (
            {"$ref": "#/$defs/args", "$defs": {"args": with_property({"$ref": "#/$defs/n"}), "n": {"const": 4}}},
            [{"a": 4}],
        ),
        (
            {
                **with_property({"const": 7}),
                "properties": {
                    "a": {"const": 7},
                    "b": {"type": "array", "items": {"$ref": "#/properties/a"}, "maxItems": 3},
                },
                "required": ["a", "b"],
            },
            None,
        ),
        (with_property({"$ref": "#/$defs/0"}, **{"$defs": doubling(DEPTH)}), [{"a": i} for i in range(1, 10)]),
        ({"type": "object", "$ref": "#/$defs/n", "$defs": {"n": with_property({"const": 8})}}, [{"a": 8}]),
        (with_property({"type": ["integer", "integer"], "enum": [6, "x"]}), [{"a": 6}]),
        (
            with_property({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, **{"$defs": {"n": {"const": 2}}}),
            [{"a": 2}, {"a": None}],
        ),
    ],
    ids=["definition", "root", "property", "doubling", "root beside its type", "a type twice", "or none"],
)
def test_references_of_a_tool_begin_from_its_own_schema(
    ask: Any, schema: dict[str, Any], allowed: list[Any] | None, strict: bool
) -> None:
    found = arguments(ask(tool(schema, strict=strict), tool_choice="required", max_tokens=600))
    if allowed is None:
        assert found["a"] == 7
        assert set(found["b"]) <= {7}
    else:
        assert found in allowed


ODD: dict[str, dict[str, Any]] = {
    "a keyword that grammars lack": with_property({"type": "array", "items": {"const": 1}, "uniqueItems": True}),
    "nothing": with_property({"not": {}}),
    "too large": with_property({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1100)}}),
    "circular": with_property({"anyOf": [{"$ref": "#/properties/a"}]}),
    "circular and more": with_property({"anyOf": [{"$ref": "#/properties/a"}, {"allOf": [{"$ref": "#"}]}]}),
    "required things that are no names": {**with_property({"type": "integer"}), "required": ["a", {}, [1]]},
    "no object": {"type": "array", "items": {"type": "integer"}},
    "another machine's": with_property({"$ref": "https://example.com/schema.json"}),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_followed_is_refused_by_the_tool_s_name_or_free(ask: Any, name: str) -> None:
    odd = ODD[name]
    form = {"type": "json_schema", "json_schema": {"name": "k", "schema": FAR}}
    ways: list[dict[str, Any]] = [{"tool_choice": "required"}, {"response_format": form}, {}]
    for way in ways:
        good = {"type": "function", "function": {"name": "good", "parameters": FAR, "strict": True}}
        error = ask(tool(odd, strict=True), good, max_tokens=2, **way)
        assert error.status_code == 400, error.text
        assert error.json()["error"]["param"] == "tools"
        assert "'f'" in error.json()["error"]["message"]
        assert ask(tool(odd), good, max_tokens=2, **way).status_code == 200


@pytest.mark.parametrize(
    "tools",
    [
        # In the third format each value that refers brings the whole schema along.
        [
            {
                "type": "object",
                "properties": {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/n"}} for i in range(30)},
                "$defs": {"n": {"enum": [f"{i}" * 20 for i in range(1000)]}},
            }
        ]
        * 10,
        [{"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(30)}}] * 250,
    ],
    ids=["references", "options"],
)
def test_tools_that_are_too_many_to_be_followed_together_take_any_arguments(ask: Any, tools: list[Any]) -> None:
    named = [{"type": "function", "function": {"name": f"f{i}", "parameters": one}} for i, one in enumerate(tools)]
    form = {"type": "json_schema", "json_schema": {"name": "k", "schema": FAR}}
    for way in ({"tool_choice": "required"}, {"response_format": form}):
        response = ask(*named, max_tokens=2, **way)
        assert response.status_code == 200, response.text


def test_arguments_are_an_object_where_the_schema_names_no_type(ask: Any) -> None:
    schema = {"properties": {"a": {"const": 3}}, "required": ["a"], "additionalProperties": False}
    assert arguments(ask(tool(schema, strict=True), tool_choice="required", max_tokens=200)) == {"a": 3}


def test_a_value_is_not_looked_up_again_with_each_piece(ask: Any) -> None:
    """Cubic and once for each token, this would take minutes."""
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(900)}
    choices = {"anyOf": [{"$ref": "#/$defs/0", "title": str(i)} for i in range(900)]}
    schema = with_property(choices, **{"$defs": {**chain, "900": {"type": "string"}}})
    assert ask(tool(schema), tool_choice="required", max_tokens=100).status_code == 200
