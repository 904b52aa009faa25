"""The chat template: messages to prompt ids, with control tokens written by the template alone.

A checkpoint brings a Jinja template. It is rendered in Jinja's sandbox, with the names that
published templates expect: `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `tools`
and `documents` (both none), `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from muser_decode.errors import DecodeError
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


class ChatTemplate:
    """Renders conversations for one tokenizer. `source` replaces the checkpoint's own template.

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
            raise TemplateUnusable("the checkpoint has no chat template; configure one")
        self._tokenizer = tokenizer
        self._source = source
        self._template = _compile(source, now)
        self._special_ids = dict(tokenizer.special_ids)
        self._spellings = Spellings(self._special_ids)
        self._bos = self._spelling(tokenizer.bos_id)
        self._eos = self._spelling(min(tokenizer.eos_ids, default=None))

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins.

        Each message maps `role`, `content` and optionally `name` to text. Roles go to the template
        as they are; text of `content` and `name` never becomes a control token, whatever it spells.
        A tokenizer that begins every text with BOS gets it once, written by the template or not.

        Raises:
            MessagesRefused: the template refuses these messages or fails on them.
        """
        texts = [text for message in messages for key, text in message.items() if key != "role"]
        shadow = Shadow(self._spellings, [*texts, *(m["role"] for m in messages), self._source])
        try:
            guarded = [
                {key: text if key == "role" else shadow.guard(text) for key, text in message.items()}
                for message in messages
            ]
            rendered = self._run(guarded)
        except _RENDER_ERRORS as error:
            raise MessagesRefused(f"the chat template cannot render these messages: {error}") from error
        ids = self._ids(rendered, shadow)
        if self._tokenizer.adds_bos and self._tokenizer.bos_id is not None and ids[:1] != [self._tokenizer.bos_id]:
            ids.insert(0, self._tokenizer.bos_id)
        return ids

    def _run(self, messages: Sequence[Mapping[str, str]]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            bos_token=self._bos,
            eos_token=self._eos,
        ):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError(f"more than {MAX_RENDERED_CHARS} characters came out")
            pieces.append(piece)
        return "".join(pieces)

    def _ids(self, rendered: str, shadow: Shadow) -> list[int]:
        ids: list[int] = []
        for text, spelling in self._spellings.split(rendered):
            if text:
                ids += self._tokenizer.encode(shadow.lift(text))
            if spelling:
                ids.append(self._special_ids[spelling])
        return ids

    def _spelling(self, token_id: int | None) -> str:
        return next((text for text, special in self._special_ids.items() if special == token_id), "")


def _compile(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateUnusable(f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
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
