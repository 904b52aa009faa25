"""JSON within a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping

from muser_decode.formats.base import SPACED, JsonObject
from muser_decode.formats.references import DEFINITIONS, begins_at_root

ROOT = "root"
"""The definition under which a schema finds the one that its references are looked up in."""

_DATA = frozenset({"const", "enum", "default", "examples"})
_NAMED = DEFINITIONS | {"properties", "patternProperties", "dependentSchemas"}


def json_rule(schema: JsonObject, root: JsonObject | None = None) -> str:
    """Return the body of a rule for JSON that follows a schema. References are looked up in `root`, else in itself."""
    whole: JsonObject = {**schema, "x-guidance": SPACED}
    if root is not None:
        moving = _Moving()
        moved = moving.schema(schema)
        if moving.moved:
            whole = {**moved, "x-guidance": SPACED, "$defs": {ROOT: moving.schema(root)}}
    return f"%json {json.dumps(whole)}"


class _Moving:
    """Rewrites references to what they are when the schema that they begin from is a definition."""

    def __init__(self) -> None:
        self.moved = False
        """Whether there was one."""

    def schema(self, schema: JsonObject) -> dict[str, object]:
        """Return a schema with its references, and those of the schemas in it, rewritten. Data are no schemas."""
        return {name: self._member(name, value) for name, value in schema.items()}

    def _member(self, name: str, value: object) -> object:
        if name == "$ref" and begins_at_root(value):
            self.moved = True
            return f"#/$defs/{ROOT}{str(value)[1:]}"
        if name in _DATA:
            return value
        if name in _NAMED and isinstance(value, Mapping):
            return {key: self._schema(one) for key, one in value.items()}
        return [self._schema(one) for one in value] if isinstance(value, list) else self._schema(value)

    def _schema(self, value: object) -> object:
        # One with an address is a root itself.
        return self.schema(value) if isinstance(value, Mapping) and "$id" not in value else value
