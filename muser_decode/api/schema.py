"""Words for writing JSON schemas briefly, and the schemas that several endpoints share."""

from __future__ import annotations

from muser_decode.api.limits import (
    MAX_CHOICES,
    MAX_DEADLINE_S,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
    MIN_DEADLINE_S,
)

Schema = dict[str, object]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object", "additionalProperties": True}


def number(low: float, high: float) -> Schema:
    """Return the schema of a number within bounds."""
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int, high: int | None = None) -> Schema:
    """Return the schema of an integer within bounds."""
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, "minItems": least} | ({} if most is None else {"maxItems": most})


def choice(*values: str) -> Schema:
    """Return the schema of one of several words."""
    return {"type": "string", "enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Return the schema of what fits one of several."""
    return {"anyOf": list(schemas)}


def constant(value: str) -> Schema:
    """Return the schema of one word."""
    return {"type": "string", "const": value}


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; unknown fields are allowed and ignored. `required` lists names."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": True}


def optional(schema: Schema) -> Schema:
    """Return a schema that null fits too: null is the default, as an absent field is."""
    return either(schema, {"type": "null"})


def optionals(**properties: Schema) -> dict[str, Schema]:
    """Return properties that may be null."""
    return {name: optional(schema) for name, schema in properties.items()}


STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
TOKEN = integer(0)

SAMPLING = optionals(
    temperature=number(0, 2),
    top_p=number(0, 1),
    top_k=integer(-1),
    min_p=number(0, 1),
    seed={"type": "integer"},
    presence_penalty=number(-2, 2),
    frequency_penalty=number(-2, 2),
    repetition_penalty=number(0.01, 100),
    logit_bias={"type": "object", "additionalProperties": number(-100, 100)},
    deadline_s=number(MIN_DEADLINE_S, MAX_DEADLINE_S),
)

GENERATION = SAMPLING | optionals(
    max_tokens=integer(1),
    max_completion_tokens=integer(1),
    stop=either(STOP, TOKEN, array(either(STOP, TOKEN), most=MAX_STOPS)),
    stop_token_ids=array(TOKEN),
    ignore_eos=FLAG,
    n=integer(1, MAX_CHOICES),
    stream=FLAG,
    stream_options=fields(include_usage=optional(FLAG), progress=optional(FLAG)),
    user=TEXT,
)

FUNCTION = fields("name", name=TEXT, description=optional(TEXT), parameters=optional(FREE), strict=optional(FLAG))
TOOL = fields("type function", type=constant("function"), function=FUNCTION)
CALL = fields(
    "function", id=TEXT, type=constant("function"), function=fields("name arguments", name=TEXT, arguments=TEXT)
)
TEXT_PART = fields("type text", type=constant("text"), text=TEXT)
CONTENT = either(TEXT, array(TEXT_PART, 1))

MESSAGE = either(
    fields("role content", role=choice("system", "developer", "user"), content=CONTENT, name=optional(TEXT)),
    fields(
        "role",
        role=constant("assistant"),
        content=optional(CONTENT),
        reasoning_content=optional(TEXT),
        tool_calls=optional(array(CALL)),
    ),
    fields("role content tool_call_id", role=constant("tool"), content=CONTENT, tool_call_id=TEXT),
)
MESSAGES = array(MESSAGE, 1, MAX_MESSAGES)

RESPONSE_FORMAT = either(
    fields("type", type=choice("text", "json_object")),
    fields("type json_schema", type=constant("json_schema"), json_schema=fields("schema", name=TEXT, schema=FREE)),
)

CHAT = optionals(
    tools=array(TOOL, most=MAX_TOOLS),
    tool_choice=either(choice("none", "auto", "required"), fields("type", type=constant("function"))),
    parallel_tool_calls=FLAG,
    response_format=RESPONSE_FORMAT,
    reasoning_effort=choice("none", "minimal", "low", "medium", "high", "xhigh"),
    chat_template_kwargs=FREE,
    logprobs=FLAG,
    top_logprobs=integer(0, MAX_LOGPROBS),
)

ERROR = fields(
    "error",
    error=fields("message type", message=TEXT, type=TEXT, param=optional(TEXT), code=optional(TEXT)),
)
ACCOUNT = optional(FREE)
USAGE = fields(
    "prompt_tokens completion_tokens total_tokens",
    prompt_tokens=integer(0),
    completion_tokens=integer(0),
    total_tokens=integer(0),
)
