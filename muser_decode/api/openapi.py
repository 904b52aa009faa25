"""The OpenAPI document. Bodies are read by hand, so it is written by hand too; one table serves both.

The same table registers the routes, so a path cannot be served without standing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muser_decode.api import schema as s
from muser_decode.api.keys import OPEN_PATHS
from muser_decode.api.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_TOOLS
from muser_decode.api.schema import Schema, array, constant, either, fields, integer, number, optional, optionals

JSON, STREAM, HTML, PLAIN = "application/json", "text/event-stream", "text/html", "text/plain"


@dataclass(frozen=True)
class Operation:
    """One path and method; `name` is by which the application knows its endpoint."""

    method: str
    path: str
    name: str
    summary: str
    answer: Schema
    body: Schema | None = None
    streams: bool = False
    kind: str = JSON
    parameters: tuple[str, ...] = ()


GUARDED = (401, 403)
"""A key that is missing or wrong, and another host's name."""

READING = (400, 404, 413, 415, 500)
GENERATING = (503, 504)

CHAT_BODY = fields("model messages", model=s.TEXT, messages=s.MESSAGES, **s.GENERATION, **s.CHAT)
COMPLETION_BODY = fields(
    "model prompt",
    model=s.TEXT,
    prompt=either(s.TEXT, array(s.TOKEN, 1), array(s.TEXT, 1, MAX_CHOICES), array(array(s.TOKEN, 1), 1, MAX_CHOICES)),
    **s.GENERATION,
    **optionals(logprobs=integer(0, MAX_LOGPROBS), add_special_tokens=s.FLAG),
)
RESPONSES_BODY = fields(
    "model input",
    model=s.TEXT,
    input=either(s.TEXT, array(s.FREE, 1)),
    **optionals(
        instructions=s.TEXT,
        max_output_tokens=integer(1),
        tools=array(
            either(
                fields("type name", type=constant("function"), name=s.TEXT, parameters=s.FREE),
                fields("type name", type=constant("custom"), name=s.TEXT, format=optional(s.FREE)),
            ),
            most=MAX_TOOLS,
        ),
        tool_choice=either(
            s.choice("none", "auto", "required"), fields("type name", type=s.choice("function", "custom"))
        ),
        parallel_tool_calls=s.FLAG,
        text=fields(format=optional(s.FREE)),
        reasoning=fields(effort=optional(s.TEXT)),
        include=array(s.TEXT),
        top_logprobs=integer(0, MAX_LOGPROBS),
        stream=s.FLAG,
        store=s.FLAG,
        metadata=s.FREE,
        user=s.TEXT,
    ),
    **s.SAMPLING,
)
BLOCKS = either(s.TEXT, array(s.FREE))
MESSAGES_BODY = fields(
    "model max_tokens messages",
    model=s.TEXT,
    max_tokens=integer(1),
    messages=array(fields("role content", role=s.choice("user", "assistant"), content=BLOCKS), 1),
    **s.SAMPLING
    | optionals(
        system=BLOCKS,
        tools=array(fields("name input_schema", name=s.TEXT, input_schema=s.FREE), most=MAX_TOOLS),
        tool_choice=fields("type", type=s.choice("auto", "any", "tool", "none")),
        thinking=fields("type", type=s.choice("enabled", "disabled", "adaptive")),
        output_config=fields(
            effort=optional(s.choice("low", "medium", "high", "xhigh", "max")),
            format=optional(fields("type schema", type=constant("json_schema"), schema=s.FREE)),
        ),
        metadata=s.FREE,
        stop_sequences=array(s.STOP),
        temperature=number(0, 1),
        stream=s.FLAG,
    ),
)
CONVERSATION = fields("messages", model=optional(s.TEXT), messages=s.MESSAGES, **s.CHAT)
WRITTEN = fields("prompt", model=optional(s.TEXT), prompt=s.TEXT, add_special_tokens=optional(s.FLAG))
TOKENS = array(s.TOKEN)
MODEL = fields("id object created owned_by", id=s.TEXT, object=constant("model"), created=integer(0), owned_by=s.TEXT)
CHOICES = fields("id object created model choices usage", choices=array(s.FREE, 1), usage=s.USAGE, muser=s.ACCOUNT)

OPERATIONS: tuple[Operation, ...] = (
    Operation("POST", "/v1/chat/completions", "chat", "Answer a conversation", CHOICES, CHAT_BODY, True),
    Operation("POST", "/v1/completions", "completions", "Continue a text", CHOICES, COMPLETION_BODY, True),
    Operation(
        "POST",
        "/v1/responses",
        "responses",
        "Answer a conversation given as items; nothing is stored",
        fields("id object output usage", output=array(s.FREE), usage=s.FREE, muser=s.ACCOUNT),
        RESPONSES_BODY,
        True,
    ),
    Operation(
        "POST",
        "/v1/messages",
        "messages",
        "Answer a conversation in Anthropic's shape",
        fields("id type role content usage", content=array(s.FREE), usage=s.FREE, muser=s.ACCOUNT),
        MESSAGES_BODY,
        True,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "count_tokens",
        "Count the tokens of a conversation in Anthropic's shape",
        fields("input_tokens", input_tokens=integer(0)),
        {**MESSAGES_BODY, "required": ["model", "messages"]},
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        "Give the token ids of a text or of a conversation",
        fields("tokens count max_model_len", tokens=TOKENS, count=integer(0), max_model_len=integer(1)),
        either(WRITTEN, CONVERSATION),
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        "Give the text of token ids",
        fields("prompt", prompt=s.TEXT),
        fields("tokens", model=optional(s.TEXT), tokens=TOKENS),
    ),
    Operation(
        "POST",
        "/apply-template",
        "apply_template",
        "Give a conversation as the model reads it",
        fields("prompt tokens", prompt=s.TEXT, tokens=TOKENS),
        CONVERSATION,
    ),
    Operation(
        "POST",
        "/explain-cache",
        "explain_cache",
        "Say which blocks of a prompt are held, and why others are not",
        fields(
            "prompt_tokens held_tokens reason blocks elsewhere ignored_stores",
            prompt_tokens=integer(0),
            held_tokens=integer(0),
            reason=s.TEXT,
            blocks=array(s.FREE),
            elsewhere=array(s.FREE),
            ignored_stores=array(s.TEXT),
        ),
        either(WRITTEN, CONVERSATION, fields("tokens", model=optional(s.TEXT), tokens=TOKENS)),
    ),
    Operation("GET", "/v1/models", "models", "List the served model", fields("object data", data=array(MODEL, 1, 1))),
    Operation("GET", "/v1/models/{model}", "model", "Describe the served model", MODEL, parameters=("model",)),
    Operation("GET", "/health", "health", "Say that the process lives", fields("status", status=constant("ok"))),
    Operation("GET", "/ready", "ready", "Say whether requests would be answered now", fields("status", status=s.TEXT)),
    Operation("GET", "/metrics", "metrics", "Counters and gauges in Prometheus' text format", s.TEXT, kind=PLAIN),
    Operation("GET", "/openapi.json", "openapi", "This document", s.FREE),
    Operation("GET", "/docs", "docs", "This document, to read", s.TEXT, kind=HTML),
    Operation("GET", "/", "page", "Chat and status in a browser", s.TEXT, kind=HTML),
)


def document(version: str, operations: Sequence[Operation] = OPERATIONS) -> Schema:
    """Return the OpenAPI document of these operations."""
    paths: dict[str, dict[str, object]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Muser",
            "version": version,
            "description": "Chats over OpenAI's and Anthropic's shapes. What cannot be honoured is refused by name.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": s.ERROR}},
    }


def _operation(operation: Operation) -> Schema:
    content = {operation.kind: {"schema": operation.answer}}
    if operation.streams:
        content[STREAM] = {"schema": s.TEXT}
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": {"description": "Answered.", "content": content}, **_refusals(operation)},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": operation.body}}}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in operation.parameters
        ]
    return described


def _refusals(operation: Operation) -> Schema:
    """Return the answers other than 200: each has an error object, but for a node that is not ready."""
    ready: Schema = {}
    statuses: tuple[int, ...] = GUARDED if operation.path not in OPEN_PATHS else GUARDED[1:]
    if operation.name == "ready":
        ready = {"503": {"description": "Not ready.", "content": {JSON: {"schema": operation.answer}}}}
    elif operation.body is not None:
        statuses += READING + (GENERATING if operation.streams else ())
    elif operation.parameters or operation.kind == PLAIN:
        statuses += (404,)
    error: Schema = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {str(status): {"description": "Refused or failed.", "content": error} for status in statuses}
    return refusals | ready
