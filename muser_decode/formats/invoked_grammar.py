"""The grammar of calls in the XML-like body of a message to a tool, in llguidance's dialect of Lark.

A text argument is any text up to its closing tag, so of a schema only its length can be followed there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from muser_decode.errors import DecodeError
from muser_decode.formats.base import JsonObject
from muser_decode.formats.conversation import Tool
from muser_decode.formats.invoked import CALLS, CALLS_END, INVOKE_END, PARAMETER_END
from muser_decode.formats.json_rule import json_rule
from muser_decode.formats.references import (
    CONSTANTS,
    DEFINITIONS,
    NOTES,
    alternatives,
    constants_of,
    of_types,
    type_list,
)
from muser_decode.formats.typed import spelled

MAX_TEXT_CHARS = 4096
"""A bound on a text's length becomes part of an automaton, whose size grows with it."""

OBJECT_KEYS = NOTES | DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
"""What may be said of arguments that can be held to it."""

_SCALARS = frozenset({"boolean", "integer", "null", "number"})
_SCALAR_KEYS = NOTES | {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

MAX_TRIALS = 64
"""How many values of a tool are tried: each takes a millisecond or more."""

MAX_CHARS = 1 << 22
"""Of a grammar. Each value that refers to its tool's schema brings the whole of that along."""

_SHARED = rf"""SPACE: /[ \n]{{0,2}}/
TEXT: /(.|\n)*/
name: /[^"<>]{{1,64}}/
text[suffix={json.dumps(PARAMETER_END)}]: /(.|\n)*/
free: "<atem:parameter name=\"" name "\">" text SPACE
"""


_NAME = re.compile(r'[^"<>\x00-\x1f\x7f]+')
"""The names of arguments that can be read."""

_WORD = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]*")
"""The texts that a grammar can have as a constant."""


class NotSayable(DecodeError):
    """A schema that the body's grammar cannot follow, or that makes it too large."""

    code = "not_sayable"


def forced_grammar(tools: Sequence[Tool], answer: JsonObject | None = None) -> str:
    """Return a grammar of a whole answer: reasoning or none, then a call of one of the tools.

    Instead of the call there may be JSON for the user that follows the schema `answer`, if that is given.

    Raises:
        NotSayable: a tool that is strict has such a schema. One that is not is followed as far as it can be, which is
            not at all where an argument's name or constants cannot be written.
    """
    rules = _Rules()
    last = [f'" to={tool.name}" <|message|> {_framed(rules.invoke(tool, typed=True))}' for tool in tools]
    if answer is not None:
        # A header without a recipient is the user's too.
        last.append(f'" to=user"? <|message|> {json_rule(answer)}')
    start = [
        "start: reasoning? last",
        'reasoning: " to=self" <|message|> TEXT <|eom|> <|start|> "assistant"',
        f"last: {' | '.join(last)}",
    ]
    return rules.grammar(start)


def body_grammar(tools: Sequence[Tool]) -> str:
    """Return a grammar of what follows the header of a message to a tool, free where a tool is not strict.

    Raises:
        NotSayable: a tool that is strict has such a schema.
    """
    rules = _Rules()
    invokes = " | ".join(rules.invoke(tool, typed=tool.strict) for tool in tools)
    # Another message may follow this one.
    return rules.grammar([f"start: {_framed(f'(({invokes}) SPACE)+')} <|eom|>?"])


def trial_grammars(tool: Tool) -> list[str]:
    """Return a grammar of a call of one tool, and of each JSON value that an argument may be and that is no scalar.

    Raises:
        NotSayable: the tool is strict and has such a schema, or has too many values.
    """
    rules = _Rules()
    call = rules.grammar([f"start: {_framed(rules.invoke(tool, typed=True))}"])
    values = dict.fromkeys(f"start: {one}" for one in rules.json)
    if len(values) > MAX_TRIALS:
        raise NotSayable
    return [call, *values]


def _framed(inner: str) -> str:
    return f"SPACE {json.dumps(CALLS)} SPACE {inner} SPACE {json.dumps(CALLS_END)} SPACE"


class _Rules:
    """Collects rules; each has a name of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._chars = 0
        self.json: list[str] = []
        """The bodies of the rules for JSON, but for scalars."""

    def grammar(self, start: Sequence[str]) -> str:
        """Return the whole."""
        return "\n".join([*start, *self._lines]) + "\n" + _SHARED

    def invoke(self, tool: Tool, *, typed: bool) -> str:
        """Return the rule of a call of this tool."""
        told = alternatives(tool.parameters, tool.parameters, into_json=True)
        schema = told.found[0] if len(told.found) == 1 else {}
        properties, needed = schema.get("properties"), schema.get("required", [])
        known = properties if typed and isinstance(properties, Mapping) else {}
        needed = needed if isinstance(needed, list) else [] if needed is None else [needed]
        names = {name for name in needed if isinstance(name, str)}
        more = schema.get("additionalProperties", True)
        closed = bool(known) or (typed and more is False)
        if tool.strict:
            plain = told.all and len(told.found) == 1 and schema.keys() <= OBJECT_KEYS
            held = all(isinstance(name, str) and name in known for name in needed) and (closed or more is True)
            if not (plain and held and type_list(schema, "object") == ["object"]):
                raise NotSayable
        parts = [
            self._parameter(name, one, tool) + "?" * (name not in names)
            for name, one in known.items()
            if one is not False or name in names
        ]
        if not closed:
            parts.append("free*")
        begin = _quoted(f'<atem:invoke name="{tool.name}">')
        return self._rule(f"{begin} SPACE {' '.join(parts)} {_quoted(INVOKE_END)}")

    def _parameter(self, name: str, schema: object, tool: Tool) -> str:
        if _NAME.fullmatch(name) is None:
            raise NotSayable
        begin = _quoted(f'<atem:parameter name="{name}">')
        return self._rule(f"{begin} {self._value(schema, tool)} SPACE")

    def _value(self, schema: object, tool: Tool) -> str:
        """Return the rule of a value and its closing tag, such that what it is read as follows the schema."""
        told = alternatives(schema, tool.parameters)
        kinds = [kind for one in told.found for kind in _by_type(one)]
        texts = [kind for kind in kinds if _is_text(kind)]
        json_only = bool(kinds) and not texts and not any(map(_has_texts, kinds))
        if isinstance(schema, Mapping) and json_only and not told.all:
            # Nothing but JSON: the library knows what all of it means together.
            return self._rule(f"{self._json(schema, tool)} {_quoted(PARAMETER_END)}")
        if not kinds or (tool.strict and not told.all):
            raise NotSayable
        others = [kind for kind in kinds if not _is_text(kind)]
        if len(texts) == 1 and all(_is_null(kind) for kind in others):
            text = self._text(texts[0], tool)
            return text if text == "text" or not others else self._rule(f"{text} | {_quoted(f'null{PARAMETER_END}')}")
        if texts:
            # Every other value is such a text too. It is read as what else it may be, so that must be said by types.
            if tool.strict and not all(_is_plain(kind) for kind in kinds):
                raise NotSayable
            return "text"
        values = [value for kind in kinds for value in self._values(kind, tool)]
        if not values:
            raise NotSayable
        return self._rule(f"({' | '.join(values)}) {_quoted(PARAMETER_END)}")

    def _values(self, schema: JsonObject, tool: Tool) -> list[str]:
        constants = constants_of(schema)
        if constants is not None and "string" in type_list(schema, "string"):
            texts = [spelled(one) for one in constants]
            if tool.strict and not _is_plain(schema):
                raise NotSayable
            if not all(_WORD.fullmatch(text) and PARAMETER_END not in text for text in texts):
                raise NotSayable
            return list(map(_quoted, texts))
        return [self._json(schema, tool)]

    def _json(self, schema: JsonObject, tool: Tool) -> str:
        rule = json_rule(schema, tool.parameters)
        if not (set(type_list(schema)) <= _SCALARS and schema.keys() <= _SCALAR_KEYS):
            self.json.append(rule)
        return self._rule(rule)

    def _text(self, schema: JsonObject, tool: Tool) -> str:
        least, most = _count(schema.get("minLength", 0)), _count(schema.get("maxLength", MAX_TEXT_CHARS))
        unbounded = least is None or most is None or max(least, most) > MAX_TEXT_CHARS
        if tool.strict and (unbounded or not schema.keys() <= NOTES | {"type", "minLength", "maxLength"}):
            raise NotSayable
        if unbounded or (not least and "maxLength" not in schema):
            return "text"
        end = PARAMETER_END.replace("/", "\\/")
        bounds = f"{{{least},{most if 'maxLength' in schema else ''}}}"
        terminal = f"BOUNDED{len(self._lines)}"
        self._lines.append(rf"{terminal}: /(.|\n){bounds}{end}/ & ~/(.|\n)*{end}(.|\n)+/")
        return terminal

    def _rule(self, body: str) -> str:
        self._chars += len(body)
        if self._chars > MAX_CHARS:
            raise NotSayable
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_text(schema: JsonObject) -> bool:
    return not CONSTANTS & schema.keys() and type_list(schema, "string") == ["string"]


def _is_null(schema: JsonObject) -> bool:
    return not CONSTANTS & schema.keys() and type_list(schema) == ["null"]


def _has_texts(schema: JsonObject) -> bool:
    return any(isinstance(one, str) for one in constants_of(schema) or ())


def _is_plain(schema: JsonObject) -> bool:
    """Say whether a schema only names types or constants."""
    return schema.keys() <= NOTES | CONSTANTS | {"type"}


def _count(value: object) -> int | None:
    """Return what JSON Schema takes for a count, 8.0 included; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _by_type(schema: JsonObject) -> list[JsonObject]:
    """Return the texts of a schema and the rest of it, where it names both."""
    named = type_list(schema)
    if len(named) < 2 or "string" not in named or CONSTANTS & schema.keys():
        return [schema]
    rest = [name for name in named if name != "string"]
    return [of_types(schema, ["string"]), of_types(schema, rest)]
