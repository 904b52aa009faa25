"""Arguments of tool calls, given the types that the tool's JSON schema names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from muser_decode.formats.base import JsonObject
from muser_decode.formats.conversation import Tool
from muser_decode.formats.references import alternatives, constants_of, is_of, referred, same, type_list, type_of


@dataclass(frozen=True)
class Kinds:
    """What one argument may be: values of some types, and constants.

    `untyped` says that there is an alternative of which nothing is known; of one without a schema that is the only one.
    """

    types: tuple[str, ...] = ()
    constants: tuple[object, ...] = ()
    untyped: bool = True

    @cached_property
    def told(self) -> tuple[str, ...]:
        """The types of all that it may be; none where that is not known. Texts come last, for anything is one."""
        if self.untyped:
            return ()
        names = dict.fromkeys([*self.types, *map(type_of, self.constants)])
        return tuple(sorted(names, key=lambda name: name == "string"))

    @cached_property
    def _spelled(self) -> dict[str, object]:
        return {spelled(value): value for value in reversed(self.constants)}

    def is_text(self, begun: str) -> bool:
        """Say whether what begins so is a text whatever follows, read as `from_text` reads it."""
        if self.told == ("string",):
            return True
        if self.untyped or set(self.types) - {"null"} != {"string"}:
            return False
        others = (*self._spelled, "null") if "null" in self.types else (*self._spelled,)
        return not any(other.startswith(begun) for other in others)

    def from_text(self, text: str) -> object:
        """Return what a text stands for: a constant, else a value of another type that it can be read as, else itself.

        Where nothing is known, only what is plainly an object or an array is read as such.

        >>> kinds = Kinds(("string", "null"), (10,), untyped=False)
        >>> [kinds.from_text(text) for text in ("10", "1", "null", "10.0")]
        [10, '1', None, 10]
        """
        if self.told == ("string",) or text in self._spelled:
            return self._spelled.get(text, text)
        value = _read(text)
        for constant in self.constants:
            if same(value, constant):
                return constant
        # What is none of the constants is of their types only where it cannot be a text.
        free = self.untyped or "string" in self.types
        names = self.types if free else self.told
        if any(name != "string" and is_of(value, name) for name in names) or (
            self.untyped and isinstance(value, list | dict)
        ):
            return value
        return text

    def coerced(self, value: object) -> object:
        """Return a JSON value with a type that it may have, where nothing is lost by it.

        >>> Kinds(("integer",), untyped=False).coerced("3"), Kinds(("string",), untyped=False).coerced(3)
        (3, '3')
        """
        if not self.told or any(is_of(value, name) for name in self.told):
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
    constants: list[object] = []
    found = alternatives(schema, root).found
    untyped = not found
    for one in found:
        named, fixed = type_list(one) or _of_all(one, root), constants_of(one)
        if fixed is not None:
            constants += fixed
        else:
            types.update(dict.fromkeys(named))
            untyped |= not named
    return Kinds(tuple(types), tuple(constants), untyped)


def _of_all(schema: JsonObject, root: JsonObject) -> list[str]:
    """Return the types of a schema that is several at once: those that one of them names."""
    several = schema.get("allOf")
    for one in several if isinstance(several, list) else ():
        target = referred(root, one.get("$ref")) if isinstance(one, Mapping) and "$ref" in one else one
        if isinstance(target, Mapping) and (named := type_list(target)):
            return named
    return []


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
            told = (
                one.get("properties") for one in alternatives(tool.parameters, tool.parameters, into_json=True).found
            )
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
