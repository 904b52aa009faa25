"""Muse Glimmer's channels: reasoning to `self`, the answer to `user`, calls to a tool in an XML-like body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from muser_decode.formats.base import JsonObject, Parser, Style, turn
from muser_decode.formats.channels import ChannelParser
from muser_decode.formats.conversation import Message, Tool
from muser_decode.formats.invoked_grammar import NotSayable, body_grammar, forced_grammar, trial_grammars

STRENGTH = "reasoning_strength"
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh"}
"""OpenAI's efforts, by strength. The model cannot be kept from reasoning, so "none" has no strength."""

STOPS = ("<|end_of_text|>", "<|eot|>")
"""`<|eom|>` is not among them: it ends the reasoning, and the answer or the call would be lost."""

TEMPLATE = """\
{{- bos_token }}
{%- macro parameter(name, value) -%}
<atem:parameter name="{{ name }}">{{ value if value is string else value | tojson }}</atem:parameter>
{%- endmacro -%}
<|start|>system<|message|>{{ 'Reasoning strength: ' ~ (reasoning_strength or 'high') }}
{%- if messages and messages[0].role == 'system' %}{{ '\n\n' ~ messages[0].content }}{% endif %}
{%- if tools %}{{ '\n\nTools:' }}
{%- for tool in tools %}{{ '\n' ~ (tool.function | tojson) }}{% endfor %}
{%- endif %}<|eot|>
{%- for message in messages %}
{%- if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|eot|>
{%- elif message.role == 'tool' %}<|start|>{{ message.name or 'tool' }}<|message|>{{ message.content }}<|eot|>
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content %}<|start|>assistant to=self<|message|>{{ message.reasoning_content }}<|eom|>
{%- endif %}
{%- if message.content or not message.tool_calls %}<|start|>assistant to=user<|message|>{{ message.content }}
{{- '<|eom|>' if message.tool_calls else '<|eot|>' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}<|start|>assistant to={{ call.function.name }}<|message|>
{{- '<atem:function_calls><atem:invoke name="' ~ call.function.name ~ '">' }}
{%- for name, value in call.function.arguments.items() %}{{ parameter(name, value) }}{% endfor %}
{{- '</atem:invoke></atem:function_calls>' }}{{ '<|eot|>' if loop.last else '<|eom|>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


class Muse:
    """See `MessageFormat`."""

    name = "muse"
    tools_as_text = False
    plain_answers = False
    forces_whole_answers = True
    template = TEMPLATE

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool], style: Style) -> list[dict[str, object]]:
        """See `MessageFormat`."""
        return [turn(message) for message in messages]

    def variables(self, effort: str | None, style: Style) -> dict[str, object] | None:
        """See `MessageFormat`."""
        if effort is None:
            return {}
        return {STRENGTH: EFFORTS[effort]} if effort in EFFORTS and STRENGTH in style.variables else None

    def parser(self, tools: Sequence[Tool], style: Style, tail: str) -> Parser:
        """See `MessageFormat`."""
        return ChannelParser(tools)

    def stop_ids(self, special_ids: Mapping[str, int], eos_ids: frozenset[int]) -> frozenset[int]:
        """See `MessageFormat`."""
        more = special_ids.get("<|eom|>")
        return frozenset(special_ids[stop] for stop in STOPS if stop in special_ids) | (eos_ids - {more})

    def forced_call(self, tools: Sequence[Tool], answer: JsonObject | None = None) -> str | None:
        """See `MessageFormat`. A JSON answer and a call are messages to different readers."""
        return _grammar(partial(forced_grammar, answer=answer), tools)

    def strict_call(self, tools: Sequence[Tool]) -> str | None:
        """See `MessageFormat`."""
        return _grammar(body_grammar, tools)

    def trials(self, tool: Tool) -> Sequence[str] | None:
        """See `MessageFormat`."""
        try:
            return trial_grammars(tool)
        except NotSayable:
            return None


def _grammar(make: Callable[[Sequence[Tool]], str], tools: Sequence[Tool]) -> str | None:
    try:
        return make(tools)
    except NotSayable:
        return None
