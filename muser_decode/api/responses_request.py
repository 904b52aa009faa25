"""What POST /v1/responses reads: items of a conversation, flat tools, and how the answer is to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muser_decode.api.errors import ApiError, invalid, unsupported
from muser_decode.api.fields import Fields, as_fields, shown, wrong_type
from muser_decode.api.limits import MAX_LOGPROBS, MAX_MESSAGES
from muser_decode.api.parameters import (
    INT64_MAX,
    TOOLS,
    Parameters,
    read_deadline,
    read_sampling,
    refuse_unsupported,
    with_logprobs,
)
from muser_decode.api.schemas import Asked, read_effort, read_model, read_schema, simple_format
from muser_decode.api.tools import TEXT_INPUT, Toolbox, check_count, chosen, hosted, read_function, text_tool
from muser_decode.api.turns import named_results, read_arguments
from muser_decode.formats.conversation import Message, Tool, ToolCall

READ = (
    TOOLS
    | {"include", "input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "text"}
    | {"top_logprobs"}
)
"""What of the known fields this endpoint reads."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_LIKELIHOODS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponsesRequest:
    """A request that can be answered. `echoed` are its fields that the answer repeats."""

    asked: Asked
    stream: bool
    echoed: Mapping[str, object]


def read_responses_request(body: dict[str, object]) -> ResponsesRequest:
    """Return the request that a JSON object describes.

    Raises:
        ApiError: 400, the first field that is missing, of a wrong type, out of range or not supported.
    """
    fields = Fields(body)
    refuse_unsupported(body, READ)
    asked = Asked(
        model=read_model(fields),
        messages=_conversation(fields),
        parameters=_parameters(fields),
        toolbox=_toolbox(fields),
        schema=_format(fields),
        effort=_effort(fields),
    )
    if asked.schema is not None and asked.toolbox.required:
        raise invalid("text.format", "'text.format' and a required tool call exclude each other.")
    return ResponsesRequest(asked, fields.boolean("stream") or False, _echoed(fields, asked))


def _echoed(fields: Fields, asked: Asked) -> dict[str, object]:
    text, choice = fields.object("text"), fields.raw("tool_choice")
    sampling = asked.parameters.sampling
    return {
        "instructions": fields.text("instructions"),
        "max_output_tokens": asked.parameters.max_tokens,
        "metadata": {} if fields.object("metadata") is None else fields.raw("metadata"),
        "parallel_tool_calls": asked.toolbox.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": asked.effort, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": (text.raw("format") if text else None) or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": _kept_tools(fields),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.text("user"),
    }


def _kept_tools(fields: Fields) -> list[object]:
    """Return the tools that the model was told of, as they came."""
    items = fields.array("tools") or []
    return [item for index, item in enumerate(items) if not hosted(as_fields(item, f"tools[{index}]"))]


def _parameters(fields: Fields) -> Parameters:
    most, deadline_s = fields.integer("max_output_tokens", 1, INT64_MAX), read_deadline(fields)
    parameters = Parameters(most, read_sampling(fields), deadline_s=deadline_s)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    # Agents ask for what other models have, such as encrypted reasoning: there is none to include.
    included = fields.array("include") or []
    if not all(isinstance(one, str) for one in included):
        raise wrong_type("include", "an array of strings", included)
    wanted = _LIKELIHOODS in included
    return with_logprobs(parameters, (top or 0) if wanted or top else None)


def _effort(fields: Fields) -> str | None:
    reasoning = fields.object("reasoning")
    return None if reasoning is None else read_effort(reasoning, "effort")


def _format(fields: Fields) -> Mapping[str, object] | None:
    text = fields.object("text")
    wanted = None if text is None else text.object("format")
    if wanted is None:
        return None
    kind = wanted.text("type")
    return read_schema(wanted, "schema") if kind == "json_schema" else simple_format(wanted, kind)


def _toolbox(fields: Fields) -> Toolbox:
    tools: list[Tool] = []
    ignored: list[str] = []
    texts: list[str] = []
    for index, item in enumerate(check_count(fields.array("tools") or [])):
        tool = as_fields(item, f"tools[{index}]")
        kind = tool.text("type")
        if hosted(tool):
            ignored.append(str(kind))
        elif kind == "custom":
            tools.append(text_tool(tool))
            texts.append(tools[-1].name)
        elif kind == "function":
            tools.append(read_function(tool, "parameters"))
        else:
            message = f"Tools of type {shown(kind)} are not supported: expected 'function' or 'custom'."
            raise unsupported(tool.param("type"), message)
    parallel = fields.boolean("parallel_tool_calls")
    box = chosen(fields.raw("tool_choice"), tuple(tools), parallel is not False, ("function", "custom"))
    return replace(box, ignored=tuple(ignored), texts=frozenset(texts))


def _conversation(fields: Fields) -> tuple[Message, ...]:
    value = fields.raw("input")
    if value is None:
        raise fields.missing("input")
    instructions = fields.text("instructions")
    first = [Message("system", instructions)] if instructions else []
    if isinstance(value, str):
        return (*first, Message("user", value))
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid("input", f"Invalid 'input': expected 1 to {MAX_MESSAGES} items, got {len(value)}.")
    items = [_item(as_fields(item, f"input[{index}]")) for index, item in enumerate(value)]
    return named_results(tuple(_joined([*first, *items])))


def _joined(items: list[Message]) -> list[Message]:
    """Return the items with everything that an assistant did in one turn as one message."""
    turns: list[Message] = []
    for item in items:
        last = turns[-1] if turns else None
        if item.role == "assistant" and last is not None and last.role == "assistant" and _continues(last, item):
            turns[-1] = replace(
                last,
                content="\n".join(text for text in (last.content, item.content) if text),
                reasoning="\n".join(text for text in (last.reasoning, item.reasoning) if text) or None,
                tool_calls=(*last.tool_calls, *item.tool_calls),
            )
        else:
            turns.append(item)
    return turns


def _continues(last: Message, item: Message) -> bool:
    """Say whether an item belongs to the turn before it: reasoning begins a turn, and text does after a call."""
    return item.reasoning is None and not (item.content and last.tool_calls)


def _item(fields: Fields) -> Message:
    kind = fields.text("type") or "message"
    if kind == "message":
        return _message(fields)
    if kind == "reasoning":
        text = _texts(fields, "content") or _texts(fields, "summary")
        return Message("assistant", "", reasoning=text)
    if kind == "function_call":
        name = fields.text("name")
        if not name:
            raise fields.missing("name")
        call = ToolCall(_call_id(fields), name, read_arguments(fields, "arguments"))
        return Message("assistant", "", tool_calls=(call,))
    if kind == "custom_tool_call":
        named, given = fields.text("name"), fields.text("input")
        if not named or given is None:
            raise fields.missing("input" if named else "name")
        return Message("assistant", "", tool_calls=(ToolCall(_call_id(fields), named, {TEXT_INPUT: given}),))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", _output(fields), tool_call_id=_call_id(fields))
    raise unsupported(fields.param("type"), f"Items of type {shown(kind)} are not supported.")


def _call_id(fields: Fields) -> str:
    call_id = fields.text("call_id")
    if call_id is None:
        raise fields.missing("call_id")
    return call_id


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role is None:
        raise fields.missing("role")
    if role not in _ROLES:
        raise invalid(fields.param("role"), f"Invalid role {shown(role)}: expected one of {', '.join(_ROLES)}.")
    if fields.raw("content") is None:
        raise fields.missing("content")
    return Message(_ROLES[role], _texts(fields, "content"))


def _output(fields: Fields) -> str:
    if fields.raw("output") is None:
        raise fields.missing("output")
    return _texts(fields, "output")


def _texts(fields: Fields, name: str) -> str:
    """Return a text, or the texts of parts joined by line ends."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong_type(fields.param(name), "a string or an array of parts", value)
    parts = (as_fields(part, f"{fields.param(name)}[{index}]") for index, part in enumerate(value))
    return "\n".join(_part(part) for part in parts)


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind is None:
        raise fields.missing("type")
    name = "refusal" if kind == "refusal" else "text"
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise _no_text(fields, kind)
    text = fields.text(name)
    if text is None:
        raise fields.missing(name)
    return text


def _no_text(fields: Fields, kind: str) -> ApiError:
    return unsupported(fields.param("type"), f"Parts of type {shown(kind)} are not supported: this server reads text.")
