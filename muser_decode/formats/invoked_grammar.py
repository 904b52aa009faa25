"""The grammar of calls in the XML-like body of a message to a tool, in llguidance's dialect of Lark.

A text argument is any text up to its closing tag, so a schema's `pattern` and `format` cannot be followed there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from muser_decode.errors import DecodeError
from muser_decode.formats.base import SPACED, JsonObject
from muser_decode.formats.conversation import Tool
from muser_decode.formats.invoked import CALLS, CALLS_END, INVOKE_END, PARAMETER_END
from muser_decode.formats.typed import resolved

MAX_TEXT_CHARS = 4096
"""A bound on a text's length becomes part of an automaton, whose size grows with it."""

_SHARED = rf"""SPACE: /[ \n]{{0,2}}/
TEXT: /(.|\n)*/
name: /[^"<>]{{1,64}}/
text[suffix={json.dumps(PARAMETER_END)}]: /(.|\n)*/
free: "<atem:parameter name=\"" name "\">" text SPACE
"""


class NotSayable(DecodeError):
    """A schema that the body's grammar cannot follow."""

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
        last.append(f'" to=user"? <|message|> %json {json.dumps({**answer, "x-guidance": SPACED})}')
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


def _framed(inner: str) -> str:
    return f"SPACE {json.dumps(CALLS)} SPACE {inner} SPACE {json.dumps(CALLS_END)} SPACE"


class _Rules:
    """Collects rules; each has a name of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def grammar(self, start: Sequence[str]) -> str:
        """Return the whole."""
        return "\n".join([*start, *self._lines]) + "\n" + _SHARED

    def invoke(self, tool: Tool, *, typed: bool) -> str:
        """Return the rule of a call of this tool."""
        schema = tool.parameters
        properties = schema.get("properties")
        known = properties if typed and isinstance(properties, Mapping) else {}
        needed = schema.get("required")
        needed = needed if isinstance(needed, list) else []
        parts = [
            self._parameter(name, one, tool) + ("" if name in needed else "?")
            for name, one in known.items()
            if isinstance(one, Mapping)
        ]
        if not known and not (typed and schema.get("additionalProperties") is False):
            parts.append("free*")
        begin = _quoted(f'<atem:invoke name="{tool.name}">')
        return self._rule(f"{begin} SPACE {' '.join(parts)} {_quoted(INVOKE_END)}")

    def _parameter(self, name: str, schema: JsonObject, tool: Tool) -> str:
        begin = _quoted(f'<atem:parameter name="{name}">')
        return self._rule(f"{begin} {self._value(schema, tool)} SPACE")

    def _value(self, schema: JsonObject, tool: Tool) -> str:
        """Return the rule of a value and its closing tag."""
        kinds = _kinds(resolved(schema, tool.parameters), tool.parameters)
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
        around = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        compact = {**around, **schema, "x-guidance": {"whitespace_flexible": False}}
        return [self._rule(f"%json {json.dumps(compact)}")]

    def _text(self, schema: JsonObject, tool: Tool) -> str:
        if tool.strict and ("pattern" in schema or "format" in schema):
            raise NotSayable
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(least, int) or (most is not None and not isinstance(most, int)):
            raise NotSayable
        if not least and most is None:
            return "text"
        if max(least, most or 0) > MAX_TEXT_CHARS:
            if tool.strict:
                raise NotSayable
            return "text"
        end = PARAMETER_END.replace("/", "\\/")
        bounds = f"{{{least},{'' if most is None else most}}}"
        terminal = f"BOUNDED{len(self._lines)}"
        self._lines.append(rf"{terminal}: /(.|\n){bounds}{end}/ & ~/(.|\n)*{end}(.|\n)+/")
        return terminal

    def _rule(self, body: str) -> str:
        name = f"rule{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_text(schema: JsonObject) -> bool:
    if "const" in schema or "enum" in schema:
        return False
    return schema.get("type", "string") == "string" and "$ref" not in schema


def _kinds(schema: JsonObject, root: JsonObject) -> list[JsonObject]:
    """Return the alternatives of a schema, each of one type."""
    for name in ("anyOf", "oneOf"):
        choices = schema.get(name)
        if isinstance(choices, list):
            inner = [resolved(one, root) for one in choices if isinstance(one, Mapping)]
            return [kind for one in inner for kind in _kinds(one, root)]
    named = schema.get("type")
    if isinstance(named, list) and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": one} for one in named]
    return [schema]
