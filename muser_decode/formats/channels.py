"""Answers in channels: headers between control tokens name whom each message is for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from muser_decode.formats.conversation import Call, Content, Delta, Reasoning, Tool
from muser_decode.formats.typed import from_text, schema_of

START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>", "<|end_of_text|>")
ROLE, TO = "assistant", " to="
SELF, USER = "self", "user"

MAX_HEADER_CHARS = 256
"""A role and a recipient; tool names have at most 64 characters in OpenAI's API."""

_INVOKE = re.compile(r'<atem:invoke name="([^"<>]*)">')
_PARAMETER = re.compile(r'<atem:parameter name="([^"<>]*)">')
_PARAMETER_END, _INVOKE_END = "</atem:parameter>", "</atem:invoke>"


class _State(Enum):
    HEADER = "header"
    SELF = "self"
    USER = "user"
    TOOL = "tool"
    BETWEEN = "between"


class ChannelParser:
    """Reads one answer, which begins within the header that the prompt opened.

    A message to a tool is shown once it is whole: as calls, or as text where it holds none. Text without
    a header, as a model that does not know the format writes it, is an answer to the user.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._state = _State.HEADER
        self._buffer = ""

    @property
    def held(self) -> int:
        """See `Parser`."""
        return len(self._buffer)

    @property
    def answering(self) -> bool:
        """See `Parser`."""
        return self._state is _State.USER

    @property
    def call_text(self) -> str | None:
        """See `Parser`."""
        return self._buffer if self._state is _State.TOOL else None

    def feed(self, text: str) -> list[Delta]:
        """See `Parser`."""
        if not text:
            return []
        if self._state is _State.SELF:
            return [Reasoning(text)]
        if self._state is _State.BETWEEN:
            # Nothing belongs between messages, so this is an answer that lost its header.
            self._state = _State.USER
        if self._state is _State.USER:
            return [Content(text)]
        self._buffer += text
        if self._state is _State.HEADER and not may_be_header(self._buffer):
            self._state = _State.USER
            return self._flush()
        return []

    def control(self, spelling: str) -> list[Delta]:
        """See `Parser`."""
        if spelling == MESSAGE and self._state is _State.HEADER:
            self._state = _state_of(recipient(self._buffer))
            self._buffer = ""
            return []
        if spelling == START or spelling in ENDS:
            deltas = self._close()
            self._state = _State.HEADER if spelling == START else _State.BETWEEN
            return deltas
        return []

    def finish(self) -> list[Delta]:
        """See `Parser`."""
        return self._close()

    def _close(self) -> list[Delta]:
        if self._state is not _State.TOOL:
            # A header that is cut off or stands for nothing has no text of the model's in it.
            known = self._state is _State.HEADER and may_be_header(self._buffer)
            rest = [] if known else self._flush()
            self._buffer = ""
            return rest
        calls = read_calls(self._buffer, self._tools)
        if calls:
            self._buffer = ""
        return list(calls) or self._flush()

    def _flush(self) -> list[Delta]:
        text, self._buffer = self._buffer, ""
        return [Content(text)] if text else []


def _state_of(name: str) -> _State:
    return {SELF: _State.SELF, USER: _State.USER}.get(name, _State.TOOL)


def recipient(header: str) -> str:
    """Return whom a message is for; the user where its header does not say.

    >>> recipient(" to=self"), recipient("assistant to=get_weather"), recipient("assistant")
    ('self', 'get_weather', 'user')
    """
    return header.partition(TO)[2].strip() or USER


def may_be_header(text: str) -> bool:
    """Say whether `text` is a header or can become one.

    >>> may_be_header("assi"), may_be_header("assistant to=us"), may_be_header("Hello")
    (True, True, False)
    """
    if ROLE.startswith(text):
        return True
    rest = text.removeprefix(ROLE)
    if TO.startswith(rest):
        return True
    return rest.startswith(TO) and len(rest) <= MAX_HEADER_CHARS and not re.search(r"\s\S", rest[len(TO) :])


def read_calls(body: str, tools: Sequence[Tool]) -> list[Call]:
    """Return the calls in a message to a tool. What is malformed or cut off within one is left out.

    Values are texts up to their closing tag, whatever they hold; a tag that never closes gives none.
    """
    calls: list[Call] = []
    place = 0
    while invoke := _INVOKE.search(body, place):
        arguments, place = _arguments(body, invoke.end(), invoke.group(1), tools)
        if body.startswith(_INVOKE_END, place):
            calls.append(Call(invoke.group(1), arguments))
    return calls


def _arguments(body: str, place: int, name: str, tools: Sequence[Tool]) -> tuple[dict[str, object], int]:
    """Return the arguments from `place` on, and where they end."""
    arguments: dict[str, object] = {}
    while True:
        while place < len(body) and body[place].isspace():
            place += 1
        parameter = _PARAMETER.match(body, place)
        end = -1 if parameter is None else body.find(_PARAMETER_END, parameter.end())
        if parameter is None or end < 0:
            return arguments, place
        value = body[parameter.end() : end]
        arguments[parameter.group(1)] = from_text(value, schema_of(tools, name, parameter.group(1)))
        place = end + len(_PARAMETER_END)
