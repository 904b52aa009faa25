"""The messages of a chat completion, read strictly into a conversation."""

from __future__ import annotations

import json

from muser_decode.api.body import deeper_than
from muser_decode.api.errors import ApiError, invalid, unsupported
from muser_decode.api.fields import Fields, as_fields, shown, wrong_type
from muser_decode.api.limits import MAX_DEPTH, MAX_MESSAGES
from muser_decode.formats.conversation import Message, ToolCall
from muser_decode.formats.typed import parse_json

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_LATER_PARTS = ("image_url", "input_audio", "file", "video_url", "audio_url")


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Return the conversation that `messages` holds.

    Raises:
        ApiError: 400, the first part that is missing, of a wrong type or not supported.
    """
    items = fields.array("messages")
    if items is None:
        raise fields.missing("messages")
    if not items:
        raise invalid("messages", "Invalid 'messages': expected at least one message.")
    if len(items) > MAX_MESSAGES:
        raise invalid("messages", f"Invalid 'messages': expected at most {MAX_MESSAGES} messages, got {len(items)}.")
    messages = tuple(_message(as_fields(item, f"messages[{index}]")) for index, item in enumerate(items))
    return named_results(messages)


def named_results(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages with each tool result named by the call that it answers, where that is known."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return tuple(
        Message("tool", m.content, m.name or names.get(m.tool_call_id or ""), tool_call_id=m.tool_call_id)
        if m.role == "tool"
        else m
        for m in messages
    )


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role is None:
        raise fields.missing("role")
    if role == "function":
        raise unsupported(fields.param("role"), "Messages of role 'function' are not supported; use 'tool'.")
    if role not in ROLES:
        raise invalid(fields.param("role"), f"Invalid role {shown(role)}: expected one of {', '.join(ROLES)}.")
    for name in ("function_call", "audio"):
        if fields.raw(name) is not None:
            raise unsupported(fields.param(name), f"{fields.param(name)!r} is not supported.")
    if role == "assistant":
        return _assistant(fields)
    if fields.raw("tool_calls") not in (None, []):
        raise invalid(fields.param("tool_calls"), "Only messages of role 'assistant' have 'tool_calls'.")
    if role == "tool" and fields.text("tool_call_id") is None:
        raise fields.missing("tool_call_id")
    if fields.raw("content") is None:
        raise fields.missing("content")
    call_id = fields.text("tool_call_id") if role == "tool" else None
    return Message(ROLES[role], _content(fields), fields.text("name"), tool_call_id=call_id)


def _assistant(fields: Fields) -> Message:
    calls = tuple(
        _call(as_fields(item, f"{fields.param('tool_calls')}[{index}]"))
        for index, item in enumerate(fields.array("tool_calls") or [])
    )
    refusal = fields.text("refusal")
    if fields.raw("content") is None and not calls and refusal is None:
        raise fields.missing("content")
    content = (refusal or "") if fields.raw("content") is None else _content(fields)
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    return Message("assistant", content, fields.text("name"), reasoning, calls)


def _call(fields: Fields) -> ToolCall:
    kind = fields.text("type")
    if kind not in (None, "function"):
        raise unsupported(fields.param("type"), f"Calls of type {shown(kind)} are not supported.")
    function = fields.object("function")
    if function is None:
        raise fields.missing("function")
    name = function.text("name")
    if not name:
        raise function.missing("name")
    return ToolCall(fields.text("id") or "", name, read_arguments(function, "arguments"))


def read_arguments(fields: Fields, field: str) -> dict[str, object]:
    """Return the arguments of an earlier call, which are JSON in a string; an empty string is none.

    Raises:
        ApiError: 400, the string does not hold a JSON object.
    """
    text = fields.text(field)
    if not text or not text.strip():
        return {}
    try:
        value = parse_json(text)
        if not isinstance(value, dict) or deeper_than(value, MAX_DEPTH):
            raise _not_arguments(fields.param(field))
        # A lone surrogate has no UTF-8 form.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise _not_arguments(fields.param(field)) from error
    return value


def _not_arguments(param: str) -> ApiError:
    return invalid(param, f"Invalid {param!r}: expected a JSON object, written as a string.")


def _content(fields: Fields) -> str:
    value = fields.raw("content")
    param = fields.param("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(param, "a string or an array of parts", value)
    if not value:
        raise invalid(param, f"Invalid {param!r}: expected at least one part.")
    return "\n".join(_part(as_fields(part, f"{param}[{index}]")) for index, part in enumerate(value))


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind is None:
        raise fields.missing("type")
    if kind in _LATER_PARTS:
        raise unsupported(fields.param("type"), f"Parts of type {kind!r} are not supported: this server reads text.")
    if kind not in ("text", "refusal"):
        raise invalid(fields.param("type"), f"Invalid part type {shown(kind)}: expected 'text'.")
    text = fields.text(kind)
    if text is None:
        raise fields.missing(kind)
    return text
