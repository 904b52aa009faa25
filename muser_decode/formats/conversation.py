"""A conversation as every endpoint and every message format understands it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCall:
    """One call that an assistant made earlier. `arguments` are JSON values."""

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; the text parts of a list are joined by line ends.

    `reasoning` and `tool_calls` belong to assistants, `tool_call_id` to tools; a tool's `name` is that of
    the call that it answers.
    """

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, which `strict` enforces."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False

    def definition(self) -> dict[str, object]:
        """Return the definition in the shape that chat templates read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.definition_parameters(),
        }
        return {"type": "function", "function": function}

    def definition_parameters(self) -> dict[str, object]:
        """Return the schema of the arguments; one without any where none was given."""
        return dict(self.parameters) or {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Content:
    """A piece of the answer that the user sees."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model said to itself."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; pieces of its arguments and the call itself follow, and nothing else between them."""

    name: str


@dataclass(frozen=True)
class CallPart:
    """A piece of the begun call's arguments, as JSON text."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call has ended. `text` is its parts together; where the answer was cut within it, `text` is cut too.

    `arguments` are what the text holds, none where it holds no JSON object.
    """

    name: str
    arguments: Mapping[str, object]
    text: str


CallDelta = CallStart | CallPart | Call
Delta = Content | Reasoning | CallDelta


def told_at_once(call: Call) -> list[CallDelta]:
    """Return the deltas of a call that nothing was told of before its end."""
    return [CallStart(call.name), CallPart(call.text), call]
