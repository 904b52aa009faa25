"""How to generate, as every endpoint's bodies say it: lengths, sampling, stops.

Unknown fields are ignored, as OpenAI's clients expect of a compatible server. A field that this server
or one of its other endpoints knows and that cannot be honoured is refused: an answer that silently left
it out would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from muser_decode.api.errors import invalid, unsupported
from muser_decode.api.fields import Fields, shown, wrong_type
from muser_decode.api.limits import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_DEADLINE_S,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MIN_DEADLINE_S,
)
from muser_decode.engine.request import SamplingParams

INT64_MAX = 2**63 - 1
TOKEN_ID_MAX = 2**31 - 1

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, whatever the model."""

MIN_TEMPERATURE = 1e-6
"""Below this the likeliest token is all that is left, and dividing logits by it leaves the range of float32."""

HARMLESS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "container": ([],),
    "continue_final_message": (False,),
    "conversation": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include": ([],),
    "input": (),
    "instructions": ("",),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "messages": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "output_config": ({},),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "structured_outputs": (),
    "suffix": ("",),
    "system": ("", []),
    "text": ({}, {"format": {"type": "text"}}),
    "thinking": ({},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""The fields that some endpoint here or a server like this one knows, but for those that every endpoint reads.

Beside each stand the values that ask for nothing beyond what every answer has; absent and null always do. An endpoint
refuses the others unless it reads the field. Nothing is kept between requests, so nothing can be referred to.
"""

LENGTHS = frozenset(
    ("max_tokens", "max_completion_tokens", "n", "stop", "stop_token_ids", "ignore_eos", "logprobs", "stream_options")
)
"""What `read_parameters` and the endpoints that call it read."""

TOOLS = frozenset({"tools", "tool_choice"})


@dataclass(frozen=True)
class Parameters:
    """How to generate. `max_tokens` None: up to the end of the context; `n` answers differ by their seeds.

    The answer ends `deadline_s` seconds after it was asked for at the latest; None: when the server says.
    """

    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=DEFAULT_TEMPERATURE))
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    deadline_s: float | None = None


def refuse_unsupported(body: Mapping[str, object], read: frozenset[str]) -> None:
    """Refuse a body that asks for what no answer of an endpoint has; `read` are the fields that the endpoint reads.

    Raises:
        ApiError: 400, naming the first such field.
    """
    for name, values in HARMLESS.items():
        value = body.get(name)
        if name in read or value is None or any(_same(value, one) for one in values):
            continue
        raise unsupported(name, f"Unsupported value for {name!r}: this endpoint cannot honour {shown(value)}.")


def _same(value: object, harmless: object) -> bool:
    # In Python True equals 1; in JSON it is another type.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def read_parameters(fields: Fields) -> Parameters:
    """Return the parameters of a chat or a completion; likelihoods are read by the endpoint.

    Raises:
        ApiError: 400, the first field of a wrong type or out of range.
    """
    stop, stop_ids = _stops(fields)
    return Parameters(
        max_tokens=_max_tokens(fields),
        sampling=read_sampling(fields),
        stop=stop,
        stop_ids=stop_ids,
        ignore_eos=fields.boolean("ignore_eos") or False,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        deadline_s=read_deadline(fields),
    )


def read_deadline(fields: Fields) -> float | None:
    """Return for how many seconds an answer is wanted.

    Raises:
        ApiError: 400.
    """
    return fields.number("deadline_s", MIN_DEADLINE_S, MAX_DEADLINE_S)


def with_logprobs(parameters: Parameters, alternatives: int | None) -> Parameters:
    """Return the parameters with likelihoods of so many alternatives."""
    return replace(parameters, sampling=replace(parameters.sampling, logprobs=alternatives))


def chat_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives a chat asks to see beside each token; None without likelihoods.

    Raises:
        ApiError: 400, a wrong type, out of range, or alternatives without likelihoods.
    """
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (top or 0) if wanted else None


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, INT64_MAX)
    new = fields.integer("max_completion_tokens", 1, INT64_MAX)
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    return old if new is None else new


def read_sampling(fields: Fields, hottest: float = 2.0) -> SamplingParams:
    """Return how tokens are drawn. `hottest` is the endpoint's highest temperature.

    Raises:
        ApiError: 400.
    """
    temperature = fields.number("temperature", 0.0, hottest)
    top_p = fields.number("top_p", 0.0, 1.0)
    # -1 is how some clients write "off".
    top_k = fields.integer("top_k", -1, INT64_MAX)
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE
    repetition = fields.number("repetition_penalty", 0.01, 100.0)
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        min_p=fields.number("min_p", 0.0, 1.0) or 0.0,
        seed=fields.integer("seed", -INT64_MAX - 1, INT64_MAX),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(fields),
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    if biases is None:
        return ()
    names = biases.names()
    if len(names) > MAX_BIASES:
        raise invalid("logit_bias", f"Invalid 'logit_bias': expected at most {MAX_BIASES} tokens, got {len(names)}.")
    for name in names:
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= TOKEN_ID_MAX):
            raise invalid("logit_bias", f"Invalid 'logit_bias': {shown(name)} is not a token id.")
    pairs = ((int(name), biases.number(name, -100.0, 100.0)) for name in names)
    return tuple((token, bias) for token, bias in pairs if bias)


def _stops(fields: Fields) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return stop strings and stop token ids; `stop` may hold both, `stop_token_ids` the latter."""
    value = fields.raw("stop")
    items = [] if value is None else value if isinstance(value, list) else [value]
    texts: list[str] = []
    ids: list[int] = []
    for index, item in enumerate(items):
        param = f"stop[{index}]" if isinstance(value, list) else "stop"
        if isinstance(item, str):
            texts.append(_stop(param, item))
        elif isinstance(item, int) and not isinstance(item, bool):
            ids.append(_token_id(param, item))
        else:
            raise wrong_type(param, "a string or a token id", item)
    for index, item in enumerate(fields.array("stop_token_ids") or []):
        ids.append(_token_id(f"stop_token_ids[{index}]", item))
    if len(texts) > MAX_STOPS or len(ids) > MAX_STOP_IDS:
        raise invalid("stop", f"Invalid 'stop': expected at most {MAX_STOPS} strings and {MAX_STOP_IDS} token ids.")
    return tuple(texts), tuple(ids)


def _stop(param: str, value: str) -> str:
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise invalid(param, f"Invalid {param!r}: expected 1 to {MAX_STOP_CHARS} characters, got {len(value)}.")
    return value


def _token_id(param: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(param, "a token id", value)
    if not 0 <= value <= TOKEN_ID_MAX:
        raise invalid(param, f"Invalid {param!r}: {shown(value)} is not a token id.")
    return value
