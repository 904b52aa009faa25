"""A chat completion request: what is asked of the model, and how the answer is to be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from muser_decode.api.errors import invalid, unsupported
from muser_decode.api.fields import Fields, shown
from muser_decode.api.limits import MAX_SCHEMA_CHARS
from muser_decode.api.parameters import (
    LENGTHS,
    TOOLS,
    Parameters,
    chat_logprobs,
    read_parameters,
    refuse_unsupported,
    with_logprobs,
)
from muser_decode.api.tools import Toolbox, read_toolbox
from muser_decode.api.turns import read_messages
from muser_decode.formats.base import ANY_OBJECT
from muser_decode.formats.conversation import Message
from muser_decode.formats.references import referred

READ = (
    LENGTHS
    | TOOLS
    | {"messages", "chat_template_kwargs", "parallel_tool_calls", "reasoning_effort", "response_format", "top_logprobs"}
)
"""What of the known fields a chat reads."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class Asked:
    """What any endpoint asks of the model. `schema` is that of a JSON answer, None for free text.

    `opening` is a text that the client says the answer begins with; it is not repeated in the answer.
    `effort` is OpenAI's word for how much to reason; None leaves it to the model. One that is only `wished` is left
    to a model that knows no such thing.
    """

    model: str
    messages: tuple[Message, ...]
    parameters: Parameters = field(default_factory=Parameters)
    toolbox: Toolbox = field(default_factory=Toolbox)
    schema: Mapping[str, object] | None = None
    effort: str | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    opening: str = ""
    wished: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A chat that can be answered, and how it is to be streamed."""

    asked: Asked
    stream: bool
    include_usage: bool
    progress: bool


def read_chat_request(body: dict[str, object]) -> ChatRequest:
    """Return the request that a JSON object describes.

    Raises:
        ApiError: 400, the first field that is missing, of a wrong type, out of range or not supported.
    """
    fields = Fields(body)
    refuse_unsupported(body, READ)
    asked = read_asked(fields)
    stream = fields.boolean("stream") or False
    include_usage, progress = stream_options(fields, stream)
    parameters = with_logprobs(asked.parameters, chat_logprobs(fields))
    return ChatRequest(replace(asked, parameters=parameters), stream, include_usage, progress)


def read_asked(fields: Fields) -> Asked:
    """Return what a chat's body asks of the model, without what concerns the answer's writing.

    Raises:
        ApiError: 400.
    """
    asked = Asked(
        model=read_model(fields),
        messages=read_messages(fields),
        parameters=read_parameters(fields),
        toolbox=read_toolbox(fields),
        schema=_response_format(fields),
        effort=read_effort(fields, "reasoning_effort"),
        variables=_variables(fields),
    )
    if asked.schema is not None and asked.toolbox.required:
        raise invalid("response_format", "'response_format' and a required tool call exclude each other.")
    return asked


def read_model(fields: Fields) -> str:
    """Return the name of the model.

    Raises:
        ApiError: 400.
    """
    model = fields.text("model")
    if model is None:
        raise fields.missing("model")
    return model


def read_effort(fields: Fields, name: str) -> str | None:
    """Return how much to reason.

    Raises:
        ApiError: 400.
    """
    effort = fields.text(name)
    if effort is not None and effort not in EFFORTS:
        param = fields.param(name)
        raise invalid(param, f"Invalid {param!r}: expected one of {', '.join(EFFORTS)}, got {shown(effort)}.")
    return effort


def stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream tells its usage, and whether it tells the prefill's progress.

    Raises:
        ApiError: 400.
    """
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return options.boolean("include_usage") or False, options.boolean("progress") or False


def _variables(fields: Fields) -> Mapping[str, object]:
    variables = fields.object("chat_template_kwargs")
    return {} if variables is None else variables.values()


def _response_format(fields: Fields) -> Mapping[str, object] | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.text("type")
    if kind == "json_schema":
        named = wanted.object("json_schema")
        if named is None:
            raise wanted.missing("json_schema")
        return read_schema(named, "schema")
    return simple_format(wanted, kind)


def simple_format(wanted: Fields, kind: str | None) -> Mapping[str, object] | None:
    """Return the schema of an answer's format that has none of its own.

    Raises:
        ApiError: 400.
    """
    if kind is None:
        raise wanted.missing("type")
    if kind not in ("text", "json_object"):
        raise unsupported(wanted.param("type"), f"Answers of type {shown(kind)} are not supported.")
    return ANY_OBJECT if kind == "json_object" else None


def read_schema(fields: Fields, name: str) -> Mapping[str, object]:
    """Return a JSON schema.

    Raises:
        ApiError: 400.
    """
    schema = fields.object(name)
    if schema is None:
        raise fields.missing(name)
    if len(json.dumps(schema.values())) > MAX_SCHEMA_CHARS:
        param = fields.param(name)
        raise invalid(param, f"Invalid {param!r}: a schema has at most {MAX_SCHEMA_CHARS} characters.")
    endless = circular_reference(schema.values())
    if endless is not None:
        param = fields.param(name)
        raise invalid(param, f"Invalid {param!r}: the reference {shown(endless)} leads only to itself.")
    return schema.values()


def circular_reference(schema: Mapping[str, object]) -> str | None:
    """Return a reference within a JSON schema from which references lead back to it and to nothing else; None: none.

    No text follows such a schema. One that holds itself among other things is no such schema.
    """
    waiting: list[object] = [schema]
    # References that are known to lead somewhere.
    ending: set[str] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            passed: set[str] = set()
            node: object = value
            while isinstance(node, dict) and isinstance(name := node.get("$ref"), str) and name not in ending:
                if name in passed:
                    return name
                passed.add(name)
                node = referred(schema, name)
            ending |= passed
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None
