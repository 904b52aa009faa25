"""Arguments of tool calls, given the types that the tool's JSON schema names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from muser_decode.formats.conversation import Tool

_PYTHON: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
}


def schema_of(tools: Sequence[Tool], name: str, parameter: str) -> Mapping[str, object]:
    """Return the schema of one parameter; an empty one where the tool or the parameter is not known."""
    for tool in tools:
        properties = resolved(tool.parameters, tool.parameters).get("properties")
        if tool.name == name and isinstance(properties, dict):
            found = properties.get(parameter)
            return _flat(found, tool.parameters) if isinstance(found, dict) else {}
    return {}


def _flat(schema: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object]:
    """Return a schema without references, of which only alternatives have alternatives."""
    found = alternatives(schema, root)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def alternatives(schema: Mapping[str, object], root: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the schemas that a value may follow, each place of `root` once however it is reached.

    None are left of one that refers to itself and to nothing else.

    >>> alternatives({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, {"$defs": {"n": {"allOf": [{"const": 1}]}}})
    [{'const': 1}, {'type': 'null'}]
    """
    waiting, seen, found = [schema], set[int](), list[Mapping[str, object]]()
    while waiting:
        one = resolved(waiting.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        choices = next((one[name] for name in ("anyOf", "oneOf") if isinstance(one.get(name), list)), None)
        whole = one.get("allOf")
        if choices is None and isinstance(whole, list) and len(whole) == 1 and "type" not in one:
            # How a reference is written that has a description.
            choices = whole
        if isinstance(choices, list):
            waiting += [choice for choice in reversed(choices) if isinstance(choice, Mapping)]
        else:
            found.append(one)
    return found


def resolved(schema: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object]:
    """Return what a schema refers to within `root`; the schema itself where it refers to nothing that is there.

    >>> resolved({"$ref": "#/$defs/n"}, {"$defs": {"n": {"type": "integer"}}})
    {'type': 'integer'}
    """
    seen: list[object] = []
    while isinstance(schema.get("$ref"), str) and schema["$ref"] not in seen:
        seen.append(schema["$ref"])
        place: object = root
        for step in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        if not isinstance(place, Mapping):
            break
        schema = place
    return schema


def from_text(text: str, schema: Mapping[str, object]) -> object:
    """Return the value that a parameter's text stands for.

    A text is what it is unless the schema names another type that it can be read as. Where the schema names
    none, only what is plainly an object or an array is read as such.

    >>> from_text("3", {"type": "string"}), from_text("3", {"type": "integer"}), from_text("3", {})
    ('3', 3, '3')
    """
    names = type_names(schema) or ["array", "object"]
    for name in names:
        if name == "string":
            return text
        value = _read(text)
        if _is(value, name):
            return value
    return text


def coerced(value: object, schema: Mapping[str, object]) -> object:
    """Return a JSON value with the type that the schema names, where nothing is lost by it.

    >>> coerced("3", {"type": "integer"}), coerced(3, {"type": "string"}), coerced("x", {"type": "integer"})
    (3, '3', 'x')
    """
    names = type_names(schema)
    if not names or any(_is(value, name) for name in names):
        return value
    if isinstance(value, str):
        return from_text(value, schema)
    if "string" in names and isinstance(value, int | float):
        return json.dumps(value)
    return value


def coerced_arguments(arguments: Mapping[str, object], tools: Sequence[Tool], name: str) -> dict[str, object]:
    """Return the arguments of a call, each coerced to its schema."""
    return {key: coerced(value, schema_of(tools, name, key)) for key, value in arguments.items()}


def parse_json(text: str) -> object:
    """Return the JSON value that `text` holds, as strict readers take it.

    Raises:
        ValueError: it holds none.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal} is out of range")
    return value


class _Unreadable:
    """What a text that is no JSON reads as: of no type."""


def _read(text: str) -> object:
    try:
        return parse_json(text.strip())
    except ValueError:
        return _Unreadable()


def type_names(schema: Mapping[str, object]) -> list[str]:
    """Return the type names of a schema, those of alternatives and of constants too; none where it names none."""
    return list(_types(schema))


def _types(schema: Mapping[str, object]) -> Iterator[str]:
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                yield from _types(choice)
    if named is None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        told = {_type(value) for value in values} if isinstance(values, list) else set()
        # Anything is a text, so that is what it is if nothing else.
        yield from sorted(told, key=lambda name: (name == "string", name))


def _type(value: object) -> str:
    return next(name for name in ("string", "boolean", "integer", *_PYTHON) if _is(value, name))


def _is(value: object, name: str) -> bool:
    if name == "string":
        return isinstance(value, str)
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _PYTHON.get(name, ()))
