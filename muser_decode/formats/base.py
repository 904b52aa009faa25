"""What every message format offers, and the reader of answers that say nothing but text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from muser_decode.formats.conversation import Content, Delta, Message, Tool, ToolCall

JsonObject = Mapping[str, object]

SPACED: Mapping[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""For llguidance: white space after JSON's separators only. A model that favours it could go on with it for ever."""

ANY_OBJECT: JsonObject = {"type": "object"}
"""The schema of any JSON object."""


class Parser(Protocol):
    """Reads one answer piece by piece. The joined results do not depend on where the text was cut."""

    @property
    def held(self) -> int:
        """Characters at the end of what was fed that no delta has shown yet."""

    @property
    def answering(self) -> bool:
        """Whether what comes next belongs to the answer that the user sees."""

    @property
    def call_text(self) -> str | None:
        """What of an unfinished call has come, after the mark that begins it; None outside a call."""

    def feed(self, text: str) -> list[Delta]:
        """Take text."""

    def control(self, spelling: str) -> list[Delta]:
        """Take a control token, by its spelling."""

    def finish(self) -> list[Delta]:
        """Take the end, which may come anywhere."""


class PlainParser:
    """Everything is the answer."""

    held = 0
    answering = True
    call_text = None

    def feed(self, text: str) -> list[Delta]:
        """See `Parser`."""
        return [Content(text)] if text else []

    def control(self, spelling: str) -> list[Delta]:
        """See `Parser`."""
        return []

    def finish(self) -> list[Delta]:
        """See `Parser`."""
        return []


@dataclass(frozen=True)
class Style:
    """What a checkpoint's template can do, read from its source."""

    takes_tools: bool
    thinks: bool
    variables: frozenset[str]


class MessageFormat(Protocol):
    """One way to write conversations down."""

    @property
    def name(self) -> str:
        """A word for logs and the status."""

    @property
    def tools_as_text(self) -> bool:
        """Whether a template that knows no tools is no obstacle to using them."""

    @property
    def plain_answers(self) -> bool:
        """Whether an answer's text follows the prompt directly, so that a client can give its beginning."""

    @property
    def forces_whole_answers(self) -> bool:
        """Whether the grammar of a forced call or answer covers the whole, headers and reasoning too."""

    @property
    def template(self) -> str:
        """The Jinja source for a checkpoint that brings none."""

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool], style: Style) -> list[dict[str, object]]:
        """Return the history as the template reads it."""

    def variables(self, effort: str | None, style: Style) -> dict[str, object] | None:
        """Return template variables for OpenAI's `reasoning_effort`; None where it cannot be honoured."""

    def parser(self, tools: Sequence[Tool], style: Style, tail: str) -> Parser:
        """Return the reader of one answer; `tail` is the prompt's text after its last control token."""

    def stop_ids(self, special_ids: Mapping[str, int], eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the ids that end an answer."""

    def forced_call(self, tools: Sequence[Tool], answer: JsonObject | None = None) -> str | None:
        """Return a grammar of answers that call one of `tools`, or follow the schema `answer` where there is one.

        Without tools it is a grammar of that answer; only formats that force whole answers are asked for it.

        None where no grammar of text describes such answers.
        """

    def strict_call(self, tools: Sequence[Tool]) -> str | None:
        """Return a grammar of what follows the mark that begins a call; None where calls cannot be constrained."""

    def trials(self, tool: Tool) -> Sequence[str] | None:
        """Return grammars that are valid and not too complex where the arguments of a tool can be held to its schema.

        Among them are those of its parts behind a choice, which nobody gets to who tries a call's grammar alone.

        None where no grammar of text describes such arguments.
        """


def turn(message: Message) -> dict[str, object]:
    """Return one turn in the shape that templates with tools share."""
    shaped: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        shaped["name"] = message.name
    if message.reasoning:
        shaped["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shaped["tool_calls"] = [call_shape(call) for call in message.tool_calls]
    if message.tool_call_id:
        shaped["tool_call_id"] = message.tool_call_id
    return shaped


def call_shape(call: ToolCall) -> dict[str, object]:
    """Return a call in the shape that templates read; arguments stay a mapping."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def call_json(call: ToolCall) -> str:
    """Return a call as models write it in JSON."""
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def with_system(messages: Iterable[dict[str, object]], text: str) -> list[dict[str, object]]:
    """Return the turns with `text` added to the system turn, which begins them."""
    turns = list(messages)
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
