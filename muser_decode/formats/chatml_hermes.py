"""ChatML turns with Hermes-style calls: JSON in `<tool_call>` tags, reasoning in `<think>` tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from muser_decode.formats.base import Parser, PlainParser, Style, call_json
from muser_decode.formats.conversation import Message, Tool
from muser_decode.formats.tagged import THINK, CallTags, TaggedFormat, TaggedParser

TAGS = CallTags("<tool_call>", "</tool_call>")
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
SWITCH = "enable_thinking"
"""The variable by which published templates switch reasoning off."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatmlHermes(TaggedFormat):
    """See `MessageFormat`."""

    name = "chatml-hermes"
    tags = TAGS
    end = "<|im_end|>"
    template = TEMPLATE

    def as_text(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        """See `TaggedFormat`. Consecutive results of tools become one turn."""
        return [_as_text(group) for group in _grouped(messages)]

    def instructions(self, tools: Sequence[Tool]) -> str:
        """See `TaggedFormat`."""
        listed = "\n".join(json.dumps(tool.definition(), ensure_ascii=False) for tool in tools)
        return (
            f"These functions can be called:\n<tools>\n{listed}\n</tools>\n"
            f"To call one, answer with its name and arguments as a JSON object between {TAGS.start} and {TAGS.end}:\n"
            f'{TAGS.start}\n{{"name": "...", "arguments": {{...}}}}\n{TAGS.end}'
        )

    def variables(self, effort: str | None, style: Style) -> dict[str, object] | None:
        """See `MessageFormat`. Reasoning is on or off; there are no strengths."""
        if effort is None or (effort == "none" and not style.thinks):
            return {}
        if SWITCH not in style.variables:
            return None
        return {SWITCH: effort != "none"}

    def parser(self, tools: Sequence[Tool], style: Style, tail: str) -> Parser:
        """See `MessageFormat`."""
        if not tools and not style.thinks:
            return PlainParser()
        return TaggedParser(tools, TAGS, thinks=style.thinks, opened=tail.rstrip().endswith(THINK))


def _grouped(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages of each turn, consecutive tool results in one."""
    numbered = enumerate(messages)
    groups = groupby(numbered, key=lambda item: "tool" if item[1].role == "tool" else item[0])
    return [[message for _, message in group] for _, group in groups]


def _as_text(group: Sequence[Message]) -> dict[str, object]:
    first = group[0]
    if first.role == "tool":
        results = (f"{RESULT}\n{message.content}\n{RESULT_END}" for message in group)
        return {"role": "user", "content": "\n".join(results)}
    calls = (f"{TAGS.start}\n{call_json(call)}\n{TAGS.end}" for call in first.tool_calls)
    text = "\n".join(part for part in (first.content, *calls) if part)
    shaped: dict[str, object] = {"role": first.role, "content": text}
    return {**shaped, "name": first.name} if first.name else shaped
