"""ChatML turns with Hermes-style calls: JSON in `<tool_call>` tags, reasoning in `<think>` tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

from muser_decode.formats.base import JsonObject, Parser, PlainParser, Style, call_json, turn, with_system
from muser_decode.formats.conversation import Message, Tool
from muser_decode.formats.tagged import THINK, CallTags, TaggedParser, body_grammar, call_grammar

TAGS = CallTags("<tool_call>", "</tool_call>")
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
SWITCH = "enable_thinking"
"""The variable by which published templates switch reasoning off."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatmlHermes:
    """See `MessageFormat`. A template that knows no tools gets them as text, in the same tags."""

    name = "chatml-hermes"
    tools_as_text = True
    plain_answers = True
    template = TEMPLATE

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool], style: Style) -> list[dict[str, object]]:
        """See `MessageFormat`."""
        if style.takes_tools:
            return [turn(message) for message in messages]
        turns = [_as_text(group) for _, group in _grouped(messages)]
        return with_system(turns, instructions(tools)) if tools else turns

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

    def stop_ids(self, special_ids: Mapping[str, int], eos_ids: frozenset[int]) -> frozenset[int]:
        """See `MessageFormat`."""
        end = special_ids.get("<|im_end|>")
        return eos_ids if end is None else eos_ids | {end}

    def forced_call(self, tools: Sequence[Tool], answer: JsonObject | None = None) -> str | None:
        """See `MessageFormat`."""
        return call_grammar(tools, TAGS, answer)

    def strict_call(self, tools: Sequence[Tool]) -> str | None:
        """See `MessageFormat`."""
        return body_grammar(tools, TAGS)


def instructions(tools: Sequence[Tool]) -> str:
    """Return what a model is told of its tools where its template does not do so."""
    listed = "\n".join(json.dumps(tool.definition(), ensure_ascii=False) for tool in tools)
    return (
        f"These functions can be called:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and arguments as a JSON object between {TAGS.start} and {TAGS.end}:\n"
        f'{TAGS.start}\n{{"name": "...", "arguments": {{...}}}}\n{TAGS.end}'
    )


def _grouped(messages: Sequence[Message]) -> list[tuple[bool, list[Message]]]:
    """Return turns, consecutive tool results in one."""
    numbered = enumerate(messages)
    groups = groupby(numbered, key=lambda item: "tool" if item[1].role == "tool" else item[0])
    return [(key == "tool", [message for _, message in group]) for key, group in groups]


def _as_text(group: Sequence[Message]) -> dict[str, object]:
    first = group[0]
    if first.role == "tool":
        results = (f"{RESULT}\n{message.content}\n{RESULT_END}" for message in group)
        return {"role": "user", "content": "\n".join(results)}
    calls = (f"{TAGS.start}\n{call_json(call)}\n{TAGS.end}" for call in first.tool_calls)
    text = "\n".join(part for part in (first.content, *calls) if part)
    shaped: dict[str, object] = {"role": first.role, "content": text}
    return {**shaped, "name": first.name} if first.name else shaped
