"""References and alternatives within a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from muser_decode.formats.base import JsonObject

NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment")
)
"""What a schema may say that no value is held to."""

DEFINITIONS = frozenset({"$defs", "definitions"})
CONSTANTS = frozenset({"const", "enum"})
MAX_PLACES = 2_000
"""Of a schema, in which alternatives are looked for. Those that people write have a few."""

_PYTHON: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf")


def begins_at_root(name: object) -> bool:
    """Say whether a reference is one that is looked up from the root of its schema on."""
    return isinstance(name, str) and (name == "#" or name.startswith("#/"))


def referred(root: JsonObject, name: object) -> object:
    """Return what a reference within the schema `root` names; None for any other, and for nothing.

    >>> referred({"properties": {"a": {"anyOf": [{"type": "null"}]}}}, "#/properties/a/anyOf/0")
    {'type': 'null'}
    """
    if not begins_at_root(name):
        return None
    node: object = root
    for part in unquote(str(name)[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal():
            node = node[int(key)] if len(key) < 6 and int(key) < len(node) else None
        else:
            node = node.get(key) if isinstance(node, Mapping) else None
    return node


@dataclass(frozen=True)
class Alternatives:
    """The schemas that a value may follow, and whether they say `all` that the schema says that they come from."""

    found: tuple[JsonObject, ...]
    all: bool


def alternatives(schema: object, root: JsonObject, *, into_json: bool = False) -> Alternatives:
    """Return a schema's alternatives, references followed; each place of `root` once however it is reached.

    A type that stands beside a choice is that of each alternative. None are left of a schema that refers to itself and
    to nothing else, of `false`, and of one with more than MAX_PLACES. One that names types but no text among them is
    left as it is unless `into_json` is set, for the grammar's library knows all of JSON.

    >>> root = {"$defs": {"n": {"allOf": [{"const": 1}]}}}
    >>> alternatives({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, root).found
    ({'const': 1}, {'type': 'null'})
    >>> alternatives({"type": ["string", "null"], "anyOf": [{"minLength": 1}, {"type": "null"}]}, {}).found
    ({'minLength': 1, 'type': ['string', 'null']}, {'type': 'null'})
    """
    waiting: list[tuple[object, tuple[str, ...]]] = [(schema, ())]
    seen = set[tuple[int, tuple[str, ...]]]()
    found, whole, once, again = list[JsonObject](), True, False, False
    while waiting:
        one, above = waiting.pop()
        if one is True:
            one = {}
        if (id(one), above) in seen:
            again = True
            continue
        if one is False:
            continue
        if not isinstance(one, Mapping):
            whole = False
            continue
        seen.add((id(one), above))
        if len(seen) > MAX_PLACES:
            return Alternatives((), all=False)
        word, choices = _choices(one, root, into_json=into_json)
        named = tuple(type_list(one))
        types = _common(above, named)
        if (above or named) and not types:
            # No value is of both.
            continue
        if choices is None:
            found.append(one if types == named else of_types(one, types))
        else:
            whole &= one.keys() <= NOTES | DEFINITIONS | {word, "type"}
            once |= word == "oneOf" and len(choices) > 1
            waiting += [(choice, types) for choice in reversed(choices)]
    return Alternatives(tuple(found), whole and not (once and (again or _overlap(found))))


def _choices(schema: JsonObject, root: JsonObject, *, into_json: bool) -> tuple[str, list[object] | None]:
    """Return the keyword that says that a schema is others, and those; None where it is what it is."""
    if not into_json and "string" not in type_list(schema, "string"):
        return "", None
    for word in _CHOICES:
        value = schema.get(word)
        if word == "$ref" and isinstance(target := referred(root, value), Mapping | bool):
            return word, [target]
        # With one schema, `allOf` is how a reference is written that has a description.
        if isinstance(value, list) and (word != "allOf" or len(value) == 1):
            return word, value
    return "", None


def _common(above: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return the types of both; none named is any."""
    if not above or not named:
        return tuple(named or above)
    both = [name for name in named if name in above or _wider(name) in above]
    return tuple(dict.fromkeys([*both, *(name for name in above if _wider(name) in named)]))


def _wider(name: str) -> str:
    """Return the type that all values of a type are of."""
    return "number" if name == "integer" else name


def of_types(schema: JsonObject, types: Sequence[str]) -> JsonObject:
    """Return a schema with other types."""
    return {**schema, "type": types[0] if len(types) == 1 else list(types)}


def _overlap(found: Sequence[JsonObject]) -> bool:
    """Say whether a value may follow two of the alternatives; where that is not plain, it may."""
    types: list[str] = []
    constants: list[tuple[str, str]] = []
    for one in found:
        fixed = constants_of(one)
        if fixed is not None:
            constants += [(_wider(type_of(value)), json.dumps(value)) for value in fixed]
        else:
            types += map(_wider, type_list(one) or [""])
    again = len(set(types)) < len(types) or len(set(constants)) < len(constants)
    return again or "" in types or any(name in types for name, _ in constants)


def type_list(schema: JsonObject, *default: str) -> list[str]:
    """Return the types that a schema names, each once; `default` where it names none."""
    named = schema.get("type")
    named = [named] if isinstance(named, str) else named if isinstance(named, list) else default
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def constants_of(schema: JsonObject) -> list[object] | None:
    """Return the values that a schema lists, of the types that it names; None where it lists none."""
    lists = [[schema[name]] if name == "const" else schema[name] for name in ("const", "enum") if name in schema]
    values = lists[0] if lists else None
    if not isinstance(values, list):
        return None
    if len(lists) > 1 and isinstance(lists[1], list):
        values = [value for value in values if any(same(value, one) for one in lists[1])]
    named = type_list(schema)
    return [value for value in values if not named or any(is_of(value, name) for name in named)]


def same(one: object, other: object) -> bool:
    """Say whether two values are the same in JSON, where 1 is 1.0 and true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_of(value: object, name: str) -> bool:
    """Say whether a JSON value is of a type; 5.0 is an integer too."""
    if isinstance(value, bool) and name != "boolean":
        return False
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON.get(name, ()))


def type_of(value: object) -> str:
    """Return the narrowest type of a JSON value."""
    return next(name for name in _PYTHON if is_of(value, name))
