"""Answers in channels: headers between control tokens name whom each message is for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from muser_decode.formats.conversation import Content, Delta, Reasoning, Tool
from muser_decode.formats.invoked import InvokedCalls

START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>", "<|end_of_text|>")
ROLE, TO = "assistant", " to="
SELF, USER = "self", "user"

MAX_HEADER_CHARS = 256
"""A role and a recipient; tool names have at most 64 characters in OpenAI's API."""


class _State(Enum):
    HEADER = "header"
    SELF = "self"
    USER = "user"
    TOOL = "tool"
    BETWEEN = "between"


class ChannelParser:
    """Reads one answer, which begins within the header that the prompt opened.

    A message to a tool that turns out to hold no call is shown as text. Text without a header, as a model that
    does not know the format writes it, is an answer to the user.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._state = _State.HEADER
        self._buffer = ""
        self._calls = InvokedCalls(tools)

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
        if self._state is _State.TOOL:
            return [*self._calls.feed(text)]
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
        deltas, begun = self._calls.end(), self._calls.begun
        self._calls = InvokedCalls(self._tools)
        if begun:
            self._buffer = ""
        return [*deltas] if begun else self._flush()

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
