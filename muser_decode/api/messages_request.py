"""What POST /v1/messages reads: Anthropic's shape of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muser_decode.api.errors import invalid, unsupported
from muser_decode.api.fields import Fields, as_fields, shown, wrong_type
from muser_decode.api.limits import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS
from muser_decode.api.parameters import (
    INT64_MAX,
    TOOLS,
    Parameters,
    read_deadline,
    read_sampling,
    refuse_unsupported,
)
from muser_decode.api.schemas import Asked, read_model, read_schema
from muser_decode.api.tools import Toolbox, check_count, hosted, only, read_function, required
from muser_decode.api.turns import named_results
from muser_decode.formats.conversation import Message, Tool, ToolCall

READ = TOOLS | {"messages", "max_tokens", "output_config", "stop_sequences", "system", "thinking"}
"""What of the known fields this endpoint reads."""

HOTTEST = 1.0
"""Anthropic's highest temperature."""

_THINKING = ("enabled", "disabled", "adaptive")

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
"""This API's efforts, in OpenAI's words."""

_SKIPPED = ("redacted_thinking",)
"""Blocks whose content only their maker can read."""


@dataclass(frozen=True)
class MessagesRequest:
    """A request that can be answered."""

    asked: Asked
    stream: bool


def read_messages_request(body: dict[str, object], *, counting: bool = False) -> MessagesRequest:
    """Return the request that a JSON object describes; one that only counts tokens needs no `max_tokens`.

    Raises:
        ApiError: 400, the first field that is missing, of a wrong type, out of range or not supported.
    """
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens", 1, INT64_MAX)
    if max_tokens is None and not counting:
        raise fields.missing("max_tokens")
    refuse_unsupported(body, READ)
    messages, opening = _begun(_messages(fields))
    effort = _effort(fields)
    asked = Asked(
        model=read_model(fields),
        messages=(*_system(fields), *messages),
        opening=opening,
        schema=_format(fields),
        parameters=_parameters(fields, max_tokens),
        toolbox=_toolbox(fields),
        effort=effort,
        wished=effort != "none",
    )
    if asked.schema is not None and asked.toolbox.required:
        raise invalid("output_config.format", "'output_config.format' and a required tool call exclude each other.")
    return MessagesRequest(asked, fields.boolean("stream") or False)


def _begun(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """Return the messages, and the text of a last one of the assistant's: the answer goes on from there."""
    last = messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        return messages, ""
    return messages[:-1], last.content.rstrip()


def _format(fields: Fields) -> Mapping[str, object] | None:
    config = fields.object("output_config")
    wanted = None if config is None else config.object("format")
    if wanted is None:
        return None
    if wanted.text("type") != "json_schema":
        raise unsupported(wanted.param("type"), f"Answers of type {shown(wanted.raw('type'))} are not supported.")
    return read_schema(wanted, "schema")


def _parameters(fields: Fields, max_tokens: int | None) -> Parameters:
    return Parameters(max_tokens, read_sampling(fields, HOTTEST), _stops(fields), deadline_s=read_deadline(fields))


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.array("stop_sequences") or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop_sequences", f"Invalid 'stop_sequences': expected at most {MAX_STOPS}, got {len(stops)}.")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise wrong_type(f"stop_sequences[{index}]", "a string", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(f"stop_sequences[{index}]", f"A stop sequence has 1 to {MAX_STOP_CHARS} characters.")
    return tuple(str(stop) for stop in stops)


def _effort(fields: Fields) -> str | None:
    """Return how much to reason: "none" where reasoning is switched off. Switched on it is a leave.

    Agents send an effort with every request, whatever the model: it is a wish.
    """
    config = fields.object("output_config")
    if _thinking(fields) == "disabled":
        return "none"
    effort = None if config is None else config.text("effort")
    if config is not None and effort is not None and effort not in _EFFORTS:
        expected = ", ".join(_EFFORTS)
        param = config.param("effort")
        raise invalid(param, f"Invalid {param!r}: expected one of {expected}, got {shown(effort)}.")
    return None if effort is None else _EFFORTS[effort]


def _thinking(fields: Fields) -> str | None:
    thinking = fields.object("thinking")
    kind = None if thinking is None else thinking.text("type")
    if kind is not None and kind not in _THINKING:
        raise invalid("thinking.type", f"Invalid 'thinking.type': {shown(kind)}; expected {', '.join(_THINKING)}.")
    return kind


def _toolbox(fields: Fields) -> Toolbox:
    items = check_count(fields.array("tools") or [])
    offered = [as_fields(item, f"tools[{index}]") for index, item in enumerate(items)]
    tools = tuple(_tool(tool) for tool in offered if not hosted(tool))
    ignored = tuple(str(tool.text("type")) for tool in offered if hosted(tool))
    return replace(_chosen(fields, tools), ignored=ignored)


def _chosen(fields: Fields, tools: tuple[Tool, ...]) -> Toolbox:
    choice = fields.object("tool_choice")
    if choice is None:
        return Toolbox(tools)
    kind = choice.text("type")
    parallel = not choice.boolean("disable_parallel_tool_use")
    if kind == "none":
        return Toolbox()
    if kind == "auto":
        return Toolbox(tools, parallel=parallel)
    if kind == "any":
        return required(tools, parallel)
    if kind == "tool":
        return only(tools, choice.text("name"), parallel)
    raise invalid("tool_choice.type", f"Invalid 'tool_choice.type': {shown(kind)}; expected auto, any, tool or none.")


def _tool(fields: Fields) -> Tool:
    if fields.text("type") not in (None, "custom"):
        raise unsupported(fields.param("type"), f"Tools of type {shown(fields.raw('type'))} are not supported.")
    if fields.object("input_schema") is None:
        raise fields.missing("input_schema")
    return read_function(fields, "input_schema")


def _system(fields: Fields) -> list[Message]:
    text = _texts(fields, "system")
    return [Message("system", text)] if text else []


def _messages(fields: Fields) -> tuple[Message, ...]:
    items = fields.array("messages")
    if items is None:
        raise fields.missing("messages")
    if not 1 <= len(items) <= MAX_MESSAGES:
        raise invalid("messages", f"Invalid 'messages': expected 1 to {MAX_MESSAGES} messages, got {len(items)}.")
    turns = [turn for index, item in enumerate(items) for turn in _turns(as_fields(item, f"messages[{index}]"))]
    return named_results(tuple(turns))


def _turns(fields: Fields) -> list[Message]:
    """Return what one message holds: results of tools stand before the user's text."""
    role = fields.text("role")
    if role is None:
        raise fields.missing("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(fields.param("role"), f"Invalid role {shown(role)}: expected user or assistant.")
    value = fields.raw("content")
    if value is None:
        raise fields.missing("content")
    if isinstance(value, str):
        return [Message(role, value)]
    if not isinstance(value, list):
        raise wrong_type(fields.param("content"), "a string or an array of blocks", value)
    blocks = [as_fields(item, f"{fields.param('content')}[{index}]") for index, item in enumerate(value)]
    pieces = [piece for block in blocks for piece in [_block(block)] if piece is not None]
    results = [piece for piece in pieces if piece.role == "tool"]
    own = [piece for piece in pieces if piece.role != "tool"]
    return [*results, *([_merged(role, own)] if own or not results else [])]


def _merged(role: str, pieces: list[Message]) -> Message:
    whole = Message(role, "\n".join(piece.content for piece in pieces if piece.content))
    reasoning = "\n".join(piece.reasoning for piece in pieces if piece.reasoning)
    calls = tuple(call for piece in pieces for call in piece.tool_calls)
    return replace(whole, reasoning=reasoning or None, tool_calls=calls)


def _block(fields: Fields) -> Message | None:
    """Return one block as a message of its own, to be merged; None for what nobody here can read."""
    kind = fields.text("type")
    if kind is None:
        raise fields.missing("type")
    if kind in _SKIPPED:
        return None
    if kind == "text":
        return Message("", _required(fields, "text"))
    if kind == "thinking":
        return Message("", "", reasoning=_required(fields, "thinking"))
    if kind == "tool_use":
        given = fields.object("input")
        call = ToolCall(_required(fields, "id"), _required(fields, "name"), {} if given is None else given.values())
        return Message("", "", tool_calls=(call,))
    if kind == "tool_result":
        failed = "error: " if fields.boolean("is_error") else ""
        return Message("tool", failed + _texts(fields, "content"), tool_call_id=_required(fields, "tool_use_id"))
    raise unsupported(fields.param("type"), f"Blocks of type {shown(kind)} are not supported: this server reads text.")


def _required(fields: Fields, name: str) -> str:
    text = fields.text(name)
    if text is None:
        raise fields.missing(name)
    return text


def _texts(fields: Fields, name: str) -> str:
    """Return a text, or the texts of blocks joined by line ends."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(fields.param(name), "a string or an array of blocks", value)
    blocks = [as_fields(item, f"{fields.param(name)}[{index}]") for index, item in enumerate(value)]
    return "\n".join(_text(block) for block in blocks)


def _text(block: Fields) -> str:
    kind = block.text("type")
    if kind == "tool_reference":
        # The name of a tool that a search found.
        return _required(block, "tool_name")
    if kind != "text":
        message = f"Blocks of type {shown(kind)} are not supported here: expected 'text'."
        raise unsupported(block.param("type"), message)
    return _required(block, "text")
