"""JSON within a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping

from muser_decode.formats.base import SPACED, JsonObject

ROOT = "root"
"""The definition under which a schema finds the one that its references are looked up in."""


def json_rule(schema: JsonObject, root: JsonObject | None = None) -> str:
    """Return the body of a rule for JSON that follows a schema. References are looked up in `root`, else in itself."""
    whole: JsonObject = {**schema, "x-guidance": SPACED}
    if root is not None and _refers(schema):
        whole = {**_members(whole), "$defs": {ROOT: _members(root)}}
    return f"%json {json.dumps(whole)}"


def _refers(value: object) -> bool:
    """Say whether there is a reference in a schema."""
    if isinstance(value, Mapping):
        return isinstance(value.get("$ref"), str) or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _members(schema: JsonObject) -> dict[str, object]:
    return {name: _moved(value, name) for name, value in schema.items()}


def _moved(value: object, name: str = "") -> object:
    """Return a part of a schema with its references as they are when what they begin from is a definition."""
    if isinstance(value, Mapping):
        return _members(value)
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return f"#/$defs/{ROOT}{value[1:]}"
    return value
