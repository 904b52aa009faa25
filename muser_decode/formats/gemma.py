"""Gemma's turns: no system role and no tools of their own, so both are written as text.

The system text goes before the first user turn, as Gemma's published templates do. Tools follow it, and a
call is a fenced block with JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from muser_decode.formats.base import JsonObject, Parser, PlainParser, Style, call_json, turn, with_system
from muser_decode.formats.conversation import Message, Tool
from muser_decode.formats.tagged import CallTags, TaggedParser, body_grammar, call_grammar

TAGS = CallTags("```tool_call\n", "\n```")

TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.first = message['content'] + '\n\n' %}{% else %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}\n"
    "{{ ns.first }}{{ message['content'] | trim }}<end_of_turn>\n{% set ns.first = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class Gemma:
    """See `MessageFormat`."""

    name = "gemma"
    tools_as_text = True
    plain_answers = True
    template = TEMPLATE

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool], style: Style) -> list[dict[str, object]]:
        """See `MessageFormat`. Turns of one side that follow one another become one: templates demand it."""
        if style.takes_tools:
            return [turn(message) for message in messages]
        turns: list[dict[str, object]] = []
        for message in messages:
            shaped = _as_text(message)
            if turns and turns[-1]["role"] == shaped["role"]:
                turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{shaped['content']}"}
            else:
                turns.append(shaped)
        return with_system(turns, instructions(tools)) if tools else turns

    def variables(self, effort: str | None, style: Style) -> dict[str, object] | None:
        """See `MessageFormat`. Gemma does not reason aloud."""
        return {} if effort in (None, "none") else None

    def parser(self, tools: Sequence[Tool], style: Style, tail: str) -> Parser:
        """See `MessageFormat`."""
        return TaggedParser(tools, TAGS, thinks=False, opened=False) if tools else PlainParser()

    def stop_ids(self, special_ids: Mapping[str, int], eos_ids: frozenset[int]) -> frozenset[int]:
        """See `MessageFormat`. Some files leave the end of a turn out of their own list."""
        end = special_ids.get("<end_of_turn>")
        return eos_ids if end is None else eos_ids | {end}

    def forced_call(self, tools: Sequence[Tool], answer: JsonObject | None = None) -> str | None:
        """See `MessageFormat`."""
        return call_grammar(tools, TAGS, answer)

    def strict_call(self, tools: Sequence[Tool]) -> str | None:
        """See `MessageFormat`."""
        return body_grammar(tools, TAGS)


def instructions(tools: Sequence[Tool]) -> str:
    """Return what the model is told of its tools."""
    listed = "\n".join(json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"These functions can be called:\n{listed}\n"
        "To call one, answer with nothing but a block like this one:\n"
        f'{TAGS.start}{{"name": "...", "arguments": {{...}}}}{TAGS.end}'
    )


def _as_text(message: Message) -> dict[str, object]:
    if message.role == "tool":
        return {"role": "user", "content": f"```tool_output\n{message.content}\n```"}
    calls = (f"{TAGS.start}{call_json(call)}{TAGS.end}" for call in message.tool_calls)
    return {"role": message.role, "content": "\n".join(part for part in (message.content, *calls) if part)}
