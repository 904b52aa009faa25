"""The chat template: messages to prompt ids, with control tokens written by the template alone.

A checkpoint brings a Jinja template. It is rendered in Jinja's sandbox, with the names that
published templates expect: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `tools`,
`documents` (none), `raise_exception`, `strftime_now`, and variables of the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from muser_decode.errors import DecodeError
from muser_decode.formats.base import Style
from muser_decode.formats.choice import recognised, style_of
from muser_decode.shadow import Shadow, Spellings

MAX_TEMPLATE_CHARS = 256 * 1024
"""Published templates have up to about 20,000 characters."""

MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""Several times the largest request body: a template that repeats messages without end is stopped here."""

# What template code can raise when the messages are not of the kind that it was written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateUnusable(DecodeError):
    """The checkpoint has no chat template, or one that cannot be compiled: the operator's to mend."""

    code = "template_unusable"


class MessagesRefused(DecodeError):
    """The chat template cannot render these messages. The text names the template's own reason."""

    code = "messages_refused"


class PromptTokenizer(Protocol):
    """The part of a tokenizer that a prompt needs; see `muser_wire.model.tokenizer.Tokenizer`."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if the vocabulary has one."""

    @property
    def adds_bos(self) -> bool:
        """Whether every text begins with it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an answer."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control tokens by spelling."""

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's Jinja source."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""


RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
)
"""Names that a template reads and a client cannot set."""

# Keys of OpenAI's shapes and of JSON schema, by which templates look things up: altered they would not be found.
_KEYS = frozenset(
    {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "id", "type", "function", "const"}
    | {"description", "parameters", "arguments", "properties", "required", "items", "enum", "default", "title"}
    | {"additionalProperties", "anyOf", "oneOf", "allOf"}
)
_TYPES = frozenset(["function", "object", "string", "number", "integer", "boolean", "array", "null"])
"""What `type` may be, which templates compare."""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. `tail` is its text after the last control token."""

    ids: list[int]
    tail: str


class ChatTemplate:
    """Renders conversations for one tokenizer. `source` replaces the checkpoint's own template.

    A checkpoint that brings none gets that of the message format that its control tokens mark.

    Raises:
        TemplateUnusable: there is no template, or it does not compile.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        source = tokenizer.chat_template if source is None else source
        if source is None:
            form = recognised(tokenizer.special_ids)
            if form is None:
                raise TemplateUnusable("the checkpoint has no chat template; configure one")
            source = form.template
        self._tokenizer = tokenizer
        self._source = source
        environment = _environment(now)
        self._template = _compile(source, environment)
        self.style: Style = style_of(source, environment)
        self._special_ids = dict(tokenizer.special_ids)
        self._spellings = Spellings(self._special_ids)
        self._bos = self._spelling(tokenizer.bos_id)
        self._eos = self._spelling(min(tokenizer.eos_ids, default=None))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the ids of `prompt`."""
        return self.prompt(messages, tools, variables).ids

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Return a conversation as ids, up to where the assistant's answer begins.

        Roles go to the template as they are. No other text becomes a control token, whatever it spells and
        wherever it stands: in content, names, calls, results of tools, definitions of tools, variables. A
        tokenizer that begins every text with BOS gets it once, written by the template or not.

        Raises:
            MessagesRefused: the template refuses these messages or fails on them.
        """
        values = {"messages": list(messages), "tools": list(tools) if tools else None, "variables": variables or {}}
        try:
            shadow = Shadow(self._spellings, [*_texts(values), self._source])
            guarded = {
                "messages": [_guarded(message, shadow) | {"role": message["role"]} for message in messages],
                "tools": [_guarded(tool, shadow) for tool in tools] if tools else None,
            }
            named = {name: _guarded(value, shadow) for name, value in (variables or {}).items()}
            rendered = self._run({**named, **guarded})
        except _RENDER_ERRORS as error:
            raise MessagesRefused(f"the chat template cannot render these messages: {error}") from error
        ids, tail = self._ids(rendered, shadow)
        if self._tokenizer.adds_bos and self._tokenizer.bos_id is not None and ids[:1] != [self._tokenizer.bos_id]:
            ids.insert(0, self._tokenizer.bos_id)
        return Prompt(ids, tail)

    def _run(self, values: Mapping[str, object]) -> str:
        pieces: list[str] = []
        size = 0
        own = {"documents": None, "add_generation_prompt": True, "bos_token": self._bos, "eos_token": self._eos}
        for piece in self._template.generate({**values, **own}):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError(f"more than {MAX_RENDERED_CHARS} characters came out")
            pieces.append(piece)
        return "".join(pieces)

    def _ids(self, rendered: str, shadow: Shadow) -> tuple[list[int], str]:
        ids: list[int] = []
        text = ""
        for text, spelling in self._spellings.split(rendered):
            if text:
                ids += self._tokenizer.encode(shadow.lift(text))
            if spelling:
                ids.append(self._special_ids[spelling])
        return ids, shadow.lift(text)

    def _spelling(self, token_id: int | None) -> str:
        return next((text for text, special in self._special_ids.items() if special == token_id), "")


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _guarded(value: Any, shadow: Shadow) -> Any:
    """Return a JSON value whose texts, keys too, cannot become control tokens."""
    if isinstance(value, str):
        return shadow.guard(value)
    if isinstance(value, Mapping):
        return {
            key if key in _KEYS else shadow.guard(key): item
            if key == "type" and isinstance(item, str) and item in _TYPES
            else _guarded(item, shadow)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded(item, shadow) for item in value]
    return value


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compile(source: str, environment: ImmutableSandboxedEnvironment) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateUnusable(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
    try:
        return environment.from_string(source)
    # Jinja compiles to Python: what it cannot express comes out as Python's own errors.
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise TemplateUnusable(f"the chat template does not compile: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is only its body."""

    # Jinja declares a mutable attribute here.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
