"""The grammar of calls in the XML-like body of a message to a tool, in llguidance's dialect of Lark.

A text argument is any text up to its closing tag, so of a schema only its length can be followed there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from muser_decode.errors import DecodeError
from muser_decode.formats.base import JsonObject
from muser_decode.formats.conversation import Tool
from muser_decode.formats.invoked import CALLS, CALLS_END, INVOKE_END, PARAMETER_END
from muser_decode.formats.json_rule import json_rule
from muser_decode.formats.typed import alternatives, resolved

MAX_TEXT_CHARS = 4096
"""A bound on a text's length becomes part of an automaton, whose size grows with it."""

CONSTANTS = frozenset({"const", "enum"})
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment"})
TEXT_KEYS = _NOTES | {"type", "minLength", "maxLength"}
"""What may be said of a text that can be held to it."""

OBJECT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
"""What may be said of arguments that can be held to it."""

MAX_CHARS = 1 << 22
"""Of a grammar. Each value that refers to its tool's schema brings the whole of that along."""

_SHARED = rf"""SPACE: /[ \n]{{0,2}}/
TEXT: /(.|\n)*/
name: /[^"<>]{{1,64}}/
text[suffix={json.dumps(PARAMETER_END)}]: /(.|\n)*/
free: "<atem:parameter name=\"" name "\">" text SPACE
"""


class NotSayable(DecodeError):
    """A schema that the body's grammar cannot follow, or that makes it too large."""

    code = "not_sayable"


def forced_grammar(tools: Sequence[Tool], answer: JsonObject | None = None) -> str:
    """Return a grammar of a whole answer: reasoning or none, then a call of one of the tools.

    Instead of the call there may be JSON for the user that follows the schema `answer`, if that is given.

    Raises:
        NotSayable: a tool that is strict has such a schema. One that is not is followed as far as it can be.
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
    """Return a grammar of a call of one tool, and of each JSON value that an argument may be.

    Raises:
        NotSayable: the tool is strict and has such a schema.
    """
    rules = _Rules()
    call = rules.grammar([f"start: {_framed(rules.invoke(tool, typed=True))}"])
    return [call, *(f"start: {one}" for one in rules.json)]


def _framed(inner: str) -> str:
    return f"SPACE {json.dumps(CALLS)} SPACE {inner} SPACE {json.dumps(CALLS_END)} SPACE"


class _Rules:
    """Collects rules; each has a name of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._chars = 0
        self.json: list[str] = []
        """The bodies of the rules for JSON."""

    def grammar(self, start: Sequence[str]) -> str:
        """Return the whole."""
        return "\n".join([*start, *self._lines]) + "\n" + _SHARED

    def invoke(self, tool: Tool, *, typed: bool) -> str:
        """Return the rule of a call of this tool."""
        schema = resolved(tool.parameters, tool.parameters)
        properties = schema.get("properties")
        known = properties if typed and isinstance(properties, Mapping) else {}
        needed = schema.get("required")
        needed = needed if isinstance(needed, list) else []
        more = schema.get("additionalProperties", True)
        closed = bool(known) or (typed and more is False)
        if tool.strict:
            held = closed or more is True
            if not (held and schema.keys() <= OBJECT_KEYS and all(name in known for name in needed)):
                raise NotSayable
        parts = [
            self._parameter(name, one, tool) + ("" if name in needed else "?")
            for name, one in known.items()
            if isinstance(one, Mapping)
        ]
        if not closed:
            parts.append("free*")
        begin = _quoted(f'<atem:invoke name="{tool.name}">')
        return self._rule(f"{begin} SPACE {' '.join(parts)} {_quoted(INVOKE_END)}")

    def _parameter(self, name: str, schema: JsonObject, tool: Tool) -> str:
        begin = _quoted(f'<atem:parameter name="{name}">')
        return self._rule(f"{begin} {self._value(schema, tool)} SPACE")

    def _value(self, schema: JsonObject, tool: Tool) -> str:
        """Return the rule of a value and its closing tag."""
        kinds = _kinds(schema, tool.parameters)
        if not kinds:
            # It refers to itself and to nothing else.
            raise NotSayable
        texts = [kind for kind in kinds if _is_text(kind)]
        if texts:
            # Every other value would be such a text too.
            return self._text(texts[0] if len(kinds) == 1 else {}, tool)
        values = [value for kind in kinds for value in self._values(kind, tool)]
        return self._rule(f"({' | '.join(values)}) {_quoted(PARAMETER_END)}")

    def _values(self, schema: JsonObject, tool: Tool) -> list[str]:
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(constants, list):
            return [_quoted(one if isinstance(one, str) else json.dumps(one)) for one in constants]
        self.json.append(json_rule(schema, tool.parameters))
        return [self._rule(self.json[-1])]

    def _text(self, schema: JsonObject, tool: Tool) -> str:
        if tool.strict and not schema.keys() <= TEXT_KEYS:
            raise NotSayable
        least, most = _count(schema.get("minLength", 0)), _count(schema.get("maxLength", MAX_TEXT_CHARS))
        if least is None or most is None or max(least, most) > MAX_TEXT_CHARS:
            if tool.strict:
                raise NotSayable
            return "text"
        if not least and "maxLength" not in schema:
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
    if CONSTANTS & schema.keys():
        return False
    return schema.get("type", "string") == "string" and "$ref" not in schema


def _count(value: object) -> int | None:
    """Return what JSON Schema takes for a count, 8.0 included; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _kinds(schema: JsonObject, root: JsonObject) -> list[JsonObject]:
    """Return the alternatives of a schema, each of one type."""
    kinds: list[JsonObject] = []
    for one in alternatives(schema, root):
        named = one.get("type")
        several = named if isinstance(named, list) and not CONSTANTS & one.keys() else None
        kinds += [one] if several is None else [{**one, "type": name} for name in several]
    return kinds
