"""Arguments of tool calls, given the types that the tool's JSON schema names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muser_decode.formats.base import JsonObject
from muser_decode.formats.conversation import Tool
from muser_decode.formats.references import alternatives, type_list

_PYTHON: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
}


@dataclass(frozen=True)
class Kinds:
    """What one argument may be: values of some types, and constants by how they are written as a text.

    `untyped` says that there is an alternative of which nothing is known; of one without a schema that is the only one.
    """

    types: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    untyped: bool = True

    @property
    def told(self) -> tuple[str, ...]:
        """The types of all that it may be; none where that is not known. Texts come last, for anything is one."""
        if self.untyped:
            return ()
        names = dict.fromkeys([*self.types, *map(_type, self.constants.values())])
        return tuple(sorted(names, key=lambda name: name == "string"))

    def is_text(self, begun: str) -> bool:
        """Say whether what begins so is a text whatever follows, read as `from_text` reads it."""
        if self.untyped or set(self.types) - {"null"} != {"string"}:
            return False
        others = (*self.constants, "null") if "null" in self.types else (*self.constants,)
        return not any(other.startswith(begun) for other in others)

    def from_text(self, text: str) -> object:
        """Return what a text stands for: a constant, else a value of another type that it can be read as, else itself.

        Where nothing is known, only what is plainly an object or an array is read as such.

        >>> kinds = Kinds(("string", "null"), {"1": 1}, untyped=False)
        >>> [kinds.from_text(text) for text in ("1", "2", "null")]
        [1, '2', None]
        """
        if text in self.constants:
            return self.constants[text]
        for name in self.told or ("array", "object"):
            value = _read(text)
            if name != "string" and _is(value, name):
                return value
        return text

    def coerced(self, value: object) -> object:
        """Return a JSON value with a type that it may have, where nothing is lost by it.

        >>> Kinds(("integer",), untyped=False).coerced("3"), Kinds(("string",), untyped=False).coerced(3)
        (3, '3')
        """
        if not self.told or any(_is(value, name) for name in self.told):
            return value
        if isinstance(value, str):
            return self.from_text(value)
        if "string" in self.told and isinstance(value, int | float):
            return json.dumps(value)
        return value


def kinds_of(schema: object, root: JsonObject) -> Kinds:
    """Return what a value may be that follows a schema.

    >>> kinds_of({"anyOf": [{"enum": ["x", 5]}, {"type": "boolean"}]}, {}).told
    ('boolean', 'integer', 'string')
    """
    types: dict[str, None] = {}
    constants: dict[str, object] = {}
    found = alternatives(schema, root).found
    untyped = not found
    for one in found:
        named, fixed = type_list(one), constants_of(one)
        if fixed is not None:
            for value in fixed:
                constants.setdefault(spelled(value), value)
        types.update(dict.fromkeys(named if fixed is None else ()))
        untyped |= fixed is None and not named
    return Kinds(tuple(types), constants, untyped)


def constants_of(schema: JsonObject) -> list[object] | None:
    """Return the values that a schema lists, of the types that it names; None where it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    named = type_list(schema)
    return [value for value in values if not named or any(_is(value, name) for name in named)]


def spelled(value: object) -> str:
    """Return a JSON value as an argument's text has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Signatures:
    """What tools' arguments may be. Each is looked up once: schemas may be large, and arguments come in pieces."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in reversed(tools)}
        self._properties: dict[str, Mapping[str, object]] = {}
        self._kinds: dict[tuple[str, str], Kinds] = {}

    def of(self, name: str, parameter: str) -> Kinds:
        """Return what a parameter of a tool may be; anything where one of them is not known."""
        place = name, parameter
        if place not in self._kinds:
            tool = self._tools.get(name)
            schema = None if tool is None else self._of_tool(tool).get(parameter)
            self._kinds[place] = Kinds() if tool is None or schema is None else kinds_of(schema, tool.parameters)
        return self._kinds[place]

    def _of_tool(self, tool: Tool) -> Mapping[str, object]:
        if tool.name not in self._properties:
            told = (one.get("properties") for one in alternatives(tool.parameters, tool.parameters).found)
            self._properties[tool.name] = next((one for one in told if isinstance(one, Mapping)), {})
        return self._properties[tool.name]

    def coerced(self, arguments: Mapping[str, object], name: str) -> dict[str, object]:
        """Return the arguments of a call, each coerced to its schema."""
        return {key: self.of(name, key).coerced(value) for key, value in arguments.items()}


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


def _type(value: object) -> str:
    return next(name for name in ("string", "boolean", "integer", *_PYTHON) if _is(value, name))


def _is(value: object, name: str) -> bool:
    if name == "string":
        return isinstance(value, str)
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _PYTHON.get(name, ()))
