"""Answers in which tags mark reasoning and tool calls, whose bodies are JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from muser_decode.formats.base import ANY_OBJECT, JsonObject, Style, turn, with_system
from muser_decode.formats.conversation import Call, Content, Delta, Message, Reasoning, Tool, told_at_once
from muser_decode.formats.json_rule import json_rule
from muser_decode.formats.references import type_list
from muser_decode.formats.streamed import JsonCall, head_at_end
from muser_decode.formats.typed import Signatures, parse_json

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class CallTags:
    """What stands before and after a call's JSON."""

    start: str
    end: str


class _State(Enum):
    START = "start"
    OPENING = "opening"
    THINKING = "thinking"
    AFTER_THINKING = "after thinking"
    ANSWER = "answer"
    CALL = "call"


_AFTER_SPACE = {_State.OPENING: _State.THINKING, _State.AFTER_THINKING: _State.ANSWER}
"""States that white space does not leave, and what anything else leads to."""


class TaggedParser:
    """Reads `<think>` at the start, and calls between `tags` anywhere in the answer.

    White space around reasoning and calls is the format's and not shown. A call whose body cannot be
    read is shown as the text that it is, unless its arguments have begun: then it is a call that was cut.
    """

    def __init__(self, tools: Sequence[Tool], tags: CallTags, *, thinks: bool, opened: bool) -> None:
        self._tools, self._tags = tools, tags
        first = _State.OPENING if opened else _State.START
        self._state = first if thinks else _State.ANSWER
        self._buffer = ""
        self._called = False
        self._reader = JsonCall(tools)

    @property
    def held(self) -> int:
        """See `Parser`."""
        return len(self._buffer)

    @property
    def answering(self) -> bool:
        """See `Parser`."""
        return self._state not in (_State.OPENING, _State.THINKING)

    @property
    def call_text(self) -> str | None:
        """See `Parser`."""
        return self._buffer if self._state is _State.CALL else None

    def feed(self, text: str) -> list[Delta]:
        """See `Parser`."""
        self._buffer += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def control(self, spelling: str) -> list[Delta]:
        """See `Parser`. Some vocabularies have the tags as control tokens."""
        known = (THINK, THINK_END, self._tags.start, self._tags.end)
        return self.feed(spelling) if spelling in known else []

    def finish(self) -> list[Delta]:
        """See `Parser`."""
        rest, self._buffer = self._buffer, ""
        if not self.answering:
            return [Reasoning(rest)] if rest.strip() else []
        if self._state is _State.CALL:
            deltas = self._reader.read(rest)
            if self._reader.begun:
                return [*deltas, self._reader.end()]
            rest = self._tags.start + rest
        if self._called or self._state is _State.AFTER_THINKING:
            rest = rest if rest.strip() else ""
        return [Content(rest)] if rest else []

    def _step(self, deltas: list[Delta]) -> bool:
        """Take what the buffer decides; return whether that changed the state."""
        if self._state is _State.START:
            return self._start()
        if self._state is _State.THINKING:
            return self._think(deltas)
        if self._state in _AFTER_SPACE:
            self._buffer = self._buffer.lstrip()
            self._state = _AFTER_SPACE[self._state] if self._buffer else self._state
            return bool(self._buffer)
        if self._state is _State.ANSWER:
            return self._answer(deltas)
        return self._call(deltas)

    def _start(self) -> bool:
        inner = self._buffer.lstrip()
        if inner.startswith(THINK):
            self._buffer, self._state = inner[len(THINK) :], _State.OPENING
            return True
        if THINK.startswith(inner):
            return False
        self._state = _State.ANSWER
        return True

    def _think(self, deltas: list[Delta]) -> bool:
        before, found, after = self._buffer.partition(THINK_END)
        if found:
            if before.rstrip():
                deltas.append(Reasoning(before.rstrip()))
            self._buffer, self._state = after, _State.AFTER_THINKING
            return True
        self._release(deltas, Reasoning, THINK_END)
        return False

    def _answer(self, deltas: list[Delta]) -> bool:
        if not self._tools:
            self._emit(deltas, Content, len(self._buffer))
            return False
        place = self._buffer.find(self._tags.start)
        if place < 0:
            self._release(deltas, Content, self._tags.start)
            return False
        self._emit(deltas, Content, len(self._buffer[:place].rstrip()))
        self._buffer = self._buffer.lstrip()[len(self._tags.start) :]
        self._state = _State.CALL
        return True

    def _call(self, deltas: list[Delta]) -> bool:
        body, found, after = self._buffer.partition(self._tags.end)
        if not found:
            deltas += self._reader.read(body[: len(body) - head_at_end(body, self._tags.end)])
            return False
        deltas += self._reader.read(body)
        deltas += [self._reader.end()] if self._reader.begun else self._whole(body)
        self._called |= isinstance(deltas[-1], Call)
        self._buffer, self._state, self._reader = after, _State.ANSWER, JsonCall(self._tools)
        return True

    def _whole(self, body: str) -> list[Delta]:
        """Return what a whole body is in which nothing was certain before its end."""
        call = read_call(body, self._tools)
        if call is None:
            return [Content(self._tags.start + body + self._tags.end)]
        return [*told_at_once(call)]

    def _release(self, deltas: list[Delta], kind: type[Content | Reasoning], tag: str) -> None:
        """Show what cannot be part of `tag` or of the white space before it."""
        keep = head_at_end(self._buffer, tag)
        shown = self._buffer[: len(self._buffer) - keep].rstrip()
        self._emit(deltas, kind, len(shown))

    def _emit(self, deltas: list[Delta], kind: type[Content | Reasoning], count: int) -> None:
        if count:
            deltas.append(kind(self._buffer[:count]))
            self._buffer = self._buffer[count:]


def read_call(body: str, tools: Sequence[Tool]) -> Call | None:
    """Return the call that a JSON body describes; None where it describes none."""
    try:
        value = parse_json(body)
        if not isinstance(value, dict):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        # Some models write the arguments as JSON in a string.
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return None
    name = value.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    arguments = Signatures(tools).coerced(arguments, name)
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which no client could be sent.
        return None
    return Call(name, arguments, text)


class TaggedFormat(ABC):
    """What formats share whose calls are JSON between `tags` and whose turns end with the control token `end`.

    See `MessageFormat`. A template that knows no tools gets them as text, in the same tags.
    """

    tags: CallTags
    end: str
    tools_as_text = True
    plain_answers = True
    forces_whole_answers = False

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool], style: Style) -> list[dict[str, object]]:
        """See `MessageFormat`."""
        if style.takes_tools:
            return [turn(message) for message in messages]
        turns = self.as_text(messages)
        return with_system(turns, self.instructions(tools)) if tools else turns

    @abstractmethod
    def as_text(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        """Return turns of role and content alone, for a template that knows no tools."""

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return what a model is told of its tools where its template does not do so."""

    def stop_ids(self, special_ids: Mapping[str, int], eos_ids: frozenset[int]) -> frozenset[int]:
        """See `MessageFormat`. Some files leave the end of a turn out of their own list."""
        end = special_ids.get(self.end)
        return eos_ids if end is None else eos_ids | {end}

    def forced_call(self, tools: Sequence[Tool], answer: JsonObject | None = None) -> str | None:
        """See `MessageFormat`."""
        return call_grammar(tools, self.tags, answer)

    def strict_call(self, tools: Sequence[Tool]) -> str | None:
        """See `MessageFormat`."""
        return body_grammar(tools, self.tags)

    def trials(self, tool: Tool) -> Sequence[str] | None:
        """See `MessageFormat`."""
        return [f"start: {json_rule(_arguments(tool))}"]


def call_grammar(tools: Sequence[Tool], tags: CallTags, answer: JsonObject | None = None) -> str:
    """Return a grammar, in llguidance's dialect of Lark, of one call in tags, or of a JSON `answer` instead."""
    other = "" if answer is None else f" | answer\nanswer: {json_rule(answer)}"
    start = f"start: {json.dumps(tags.start)} call {json.dumps(tags.end)}{other}"
    return f"{start}\n{_calls(tools, strict=True)}"


def body_grammar(tools: Sequence[Tool], tags: CallTags) -> str:
    """Return a grammar of a call's body and end. The arguments of tools that are not strict are free."""
    start = f"start: SPACE call SPACE {json.dumps(tags.end.strip())}\nSPACE: /[ \\n]{{0,4}}/"
    return f"{start}\n{_calls(tools, strict=False)}"


def _calls(tools: Sequence[Tool], *, strict: bool) -> str:
    lines = [f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        # Arguments have a rule of their own, for their schema's references begin from that schema.
        begin = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        arguments = _arguments(tool) if strict or tool.strict else ANY_OBJECT
        lines += [f'call{index}: {begin} arguments{index} "}}"', f"arguments{index}: {json_rule(arguments)}"]
    return "\n".join(lines) + "\n"


def _arguments(tool: Tool) -> JsonObject:
    """Return the schema of a call's arguments: of what a tool's schema allows, the objects."""
    schema = tool.definition_parameters()
    # A schema that allows none is left as it is, and refused as what cannot be followed.
    return {**schema, "type": "object"} if "object" in type_list(schema, "object") else {"allOf": [schema, ANY_OBJECT]}
