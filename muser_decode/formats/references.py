"""References and alternatives within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from muser_decode.formats.base import JsonObject

NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment")
)
"""What a schema may say that no value is held to."""

DEFINITIONS = frozenset({"$defs", "definitions"})
CONSTANTS = frozenset({"const", "enum"})
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf")


def referred(root: JsonObject, name: object) -> object:
    """Return what a reference within the schema `root` names; None for any other, and for nothing.

    >>> referred({"properties": {"a": {"anyOf": [{"type": "null"}]}}}, "#/properties/a/anyOf/0")
    {'type': 'null'}
    """
    if not isinstance(name, str) or (name != "#" and not name.startswith("#/")):
        return None
    node: object = root
    for part in unquote(name[1:]).split("/")[1:]:
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


def alternatives(schema: object, root: JsonObject) -> Alternatives:
    """Return a schema's alternatives, references followed; each place of `root` once however it is reached.

    None are left of a schema that refers to itself and to nothing else, and of `false`. One that names types but no
    text among them is left as it is: nothing about JSON has to be known of it.

    >>> root = {"$defs": {"n": {"allOf": [{"const": 1}]}}}
    >>> alternatives({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, root).found
    ({'const': 1}, {'type': 'null'})
    """
    waiting, seen, found, whole = [schema], set[int](), list[JsonObject](), True
    while waiting:
        one = waiting.pop()
        if one is True:
            one = {}
        if one is False or id(one) in seen:
            continue
        if not isinstance(one, Mapping):
            whole = False
            continue
        seen.add(id(one))
        word, choices = _choices(one, root)
        if choices is None:
            found.append(one)
        else:
            whole &= one.keys() <= NOTES | DEFINITIONS | {word}
            waiting += reversed(choices)
    return Alternatives(tuple(found), whole)


def _choices(schema: JsonObject, root: JsonObject) -> tuple[str, list[object] | None]:
    """Return the keyword that says that a schema is others, and those; None where it is what it is."""
    if "string" not in type_list(schema, "string"):
        return "", None
    for word in _CHOICES:
        value = schema.get(word)
        if word == "$ref" and isinstance(target := referred(root, value), Mapping | bool):
            return word, [target]
        # With one schema, `allOf` is how a reference is written that has a description.
        if isinstance(value, list) and (word != "allOf" or len(value) == 1):
            return word, value
    return "", None


def type_list(schema: JsonObject, *default: str) -> list[str]:
    """Return the types that a schema names; `default` where it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else list(default)
