"""A chat completion request: which parameters exist, their ranges, and what is refused by name.

Unknown fields are ignored, as OpenAI's clients expect of a compatible server. A known parameter
that this server cannot honour is refused instead: an answer that silently left it out would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from muser_decode.api.errors import invalid, unsupported
from muser_decode.api.fields import Fields, as_fields, shown, wrong_type
from muser_decode.api.limits import MAX_STOP_CHARS, MAX_STOPS
from muser_decode.engine.request import SamplingParams

INT64_MAX = 2**63 - 1

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, whatever the model."""

MIN_TEMPERATURE = 1e-6
"""Below this the likeliest token is all that is left, and dividing logits by it leaves the range of float32."""

# Values that ask for nothing beyond what every answer has. Absent and null are always harmless.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_LATER_ROLES = ("tool", "function")
_LATER_PARTS = ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url")


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user or assistant; the text parts of a list are joined by line ends."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered. `max_tokens` None: up to the end of the context."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_chat_request(body: dict[str, object]) -> ChatRequest:
    """Return the request that a JSON object describes.

    Raises:
        ApiError: 400, the first field that is missing, of a wrong type, out of range or not supported.
    """
    fields = Fields(body)
    _refuse_unsupported(body)
    model = fields.text("model")
    if model is None:
        raise fields.missing("model")
    stream = fields.boolean("stream") or False
    return ChatRequest(
        model=model,
        messages=_messages(fields),
        max_tokens=_max_tokens(fields),
        sampling=_sampling(fields),
        stop=_stops(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def _refuse_unsupported(body: dict[str, object]) -> None:
    for name, harmless in _HARMLESS.items():
        value = body.get(name)
        if value is None or any(_same(value, one) for one in harmless):
            continue
        raise unsupported(name, f"Unsupported value for {name!r}: this server cannot honour {shown(value)}.")


def _same(value: object, harmless: object) -> bool:
    # In Python True equals 1; in JSON it is another type.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _messages(fields: Fields) -> tuple[Message, ...]:
    items = fields.array("messages")
    if items is None:
        raise fields.missing("messages")
    if not items:
        raise invalid("messages", "Invalid 'messages': expected at least one message.")
    return tuple(_message(as_fields(item, f"messages[{index}]")) for index, item in enumerate(items))


def _message(fields: Fields) -> Message:
    role = fields.text("role")
    if role is None:
        raise fields.missing("role")
    if role in _LATER_ROLES:
        raise unsupported(fields.param("role"), f"Messages of role {role!r} are not supported.")
    if role not in _ROLES:
        raise invalid(fields.param("role"), f"Invalid role {shown(role)}: expected one of {', '.join(_ROLES)}.")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.raw(name) not in (None, []):
            raise unsupported(fields.param(name), f"{fields.param(name)!r} is not supported.")
    return Message(_ROLES[role], _content(fields), fields.text("name"))


def _content(fields: Fields) -> str:
    value = fields.raw("content")
    param = fields.param("content")
    if value is None:
        raise fields.missing("content")
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
    if kind != "text":
        raise invalid(fields.param("type"), f"Invalid part type {shown(kind)}: expected 'text'.")
    text = fields.text("text")
    if text is None:
        raise fields.missing("text")
    return text


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, INT64_MAX)
    new = fields.integer("max_completion_tokens", 1, INT64_MAX)
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    return old if new is None else new


def _sampling(fields: Fields) -> SamplingParams:
    temperature = fields.number("temperature", 0.0, 2.0)
    top_p = fields.number("top_p", 0.0, 1.0)
    # -1 is how some clients write "off".
    top_k = fields.integer("top_k", -1, INT64_MAX)
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        seed=fields.integer("seed", -INT64_MAX - 1, INT64_MAX),
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (_stop("stop", value),)
    if not isinstance(value, list):
        raise wrong_type("stop", "a string or an array of strings", value)
    if len(value) > MAX_STOPS:
        raise invalid("stop", f"Invalid 'stop': expected at most {MAX_STOPS} strings, got {len(value)}.")
    return tuple(_stop(f"stop[{index}]", item) for index, item in enumerate(value))


def _stop(param: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise invalid(param, f"Invalid {param!r}: expected 1 to {MAX_STOP_CHARS} characters, got {len(value)}.")
    return value


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return options.boolean("include_usage") or False
