"""Gemma's turns: no system role and no tools of their own, so both are written as text.

The system text goes before the first user turn, as Gemma's published templates do. Tools follow it, and a
call is a fenced block with JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from muser_decode.formats.base import Parser, PlainParser, Style, call_json
from muser_decode.formats.conversation import Message, Tool
from muser_decode.formats.tagged import CallTags, TaggedFormat, TaggedParser

TAGS = CallTags("```tool_call\n", "\n```")

TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.first = message['content'] + '\n\n' %}{% else %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}\n"
    "{{ ns.first }}{{ message['content'] | trim }}<end_of_turn>\n{% set ns.first = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class Gemma(TaggedFormat):
    """See `MessageFormat`."""

    name = "gemma"
    tags = TAGS
    end = "<end_of_turn>"
    template = TEMPLATE

    def as_text(self, messages: Sequence[Message]) -> list[dict[str, object]]:
        """See `TaggedFormat`. Turns of one side that follow one another become one: templates demand it."""
        turns: list[dict[str, object]] = []
        for message in messages:
            shaped = _as_text(message)
            if turns and turns[-1]["role"] == shaped["role"]:
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{shaped['content']}"}
            else:
                turns.append(shaped)
        return turns

    def instructions(self, tools: Sequence[Tool]) -> str:
        """See `TaggedFormat`."""
        listed = "\n".join(json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in tools)
        return (
            f"These functions can be called:\n{listed}\n"
            "To call one, answer with nothing but a block like this one:\n"
            f'{TAGS.start}{{"name": "...", "arguments": {{...}}}}{TAGS.end}'
        )

    def variables(self, effort: str | None, style: Style) -> dict[str, object] | None:
        """See `MessageFormat`. Gemma does not reason aloud."""
        return {} if effort in (None, "none") else None

    def parser(self, tools: Sequence[Tool], style: Style, tail: str) -> Parser:
        """See `MessageFormat`."""
        return TaggedParser(tools, TAGS, thinks=False, opened=False) if tools else PlainParser()


def _as_text(message: Message) -> dict[str, object]:
    if message.role == "tool":
        return {"role": "user", "content": f"```tool_output\n{message.content}\n```"}
    calls = (f"{TAGS.start}{call_json(call)}{TAGS.end}" for call in message.tool_calls)
    return {"role": message.role, "content": "\n".join(part for part in (message.content, *calls) if part)}
