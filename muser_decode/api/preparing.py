"""From what a client asks to what the engine is asked: prompts, limits, grammars, readers of answers."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from muser_decode.api.answer import Answer, Reading
from muser_decode.api.backend import ChatBackend
from muser_decode.api.errors import ApiError, invalid, unsupported
from muser_decode.api.limits import Limits
from muser_decode.api.logprobs import Spelling
from muser_decode.api.models import model_not_found
from muser_decode.api.parameters import Parameters
from muser_decode.api.run import Run
from muser_decode.api.schemas import Asked
from muser_decode.engine.request import GenerationRequest, SamplingParams, TokenConstraint
from muser_decode.formats.base import ANY_OBJECT, Parser, PlainParser
from muser_decode.formats.choice import choose
from muser_decode.formats.conversation import Tool
from muser_decode.formats.tagged import THINK
from muser_decode.grammar import (
    AfterReasoning,
    GrammarConstraint,
    GrammarRefused,
    Grammars,
    InCalls,
    Listener,
    json_grammar,
    lark_grammar,
)
from muser_decode.template import RESERVED, ChatTemplate, MessagesRefused, Prompt

STRICT = "be held to 'strict' arguments"


@dataclass(frozen=True)
class Prepared:
    """A request that was understood: the engine's requests, and how their answers are read."""

    requests: tuple[GenerationRequest, ...]
    readings: tuple[Reading, ...]

    @property
    def id(self) -> str:
        """The name of the whole answer."""
        return self.requests[0].request_id


class Kitchen:
    """Prepares requests for one backend, and starts them."""

    def __init__(self, backend: ChatBackend, template: ChatTemplate, limits: Limits) -> None:
        self.backend, self.limits = backend, limits
        self._template = template
        tokenizer = backend.tokenizer
        self._format = choose(tokenizer.special_ids)
        self.stop_ids = self._format.stop_ids(tokenizer.special_ids, tokenizer.eos_ids)
        self._controls = {token_id: spelling for spelling, token_id in tokenizer.special_ids.items()}
        self._grammars = Grammars(tokenizer, self.stop_ids)
        self.spelling = Spelling(tokenizer, tokenizer.special_ids)

    def conversation(self, asked: Asked, prefix: str, form_param: str = "response_format") -> Prepared:
        """Return the generations that a conversation asks for. Touches no event loop.

        `form_param` is what the endpoint calls the parameter that has the answer's schema.

        Raises:
            ApiError: the request is refused.
        """
        prompt = self.prompt(asked)
        self._room(prompt.ids)
        tools = asked.toolbox.tools
        parser = partial(self._format.parser, tools, self._template.style, prompt.tail)
        constrain = self._constraint(asked, parser, form_param)
        return self._prepared(
            prompt.ids, asked.parameters, prefix, parser, constrain=constrain, one_call=not asked.toolbox.parallel
        )

    def text(self, prompt_ids: Sequence[int], parameters: Parameters, prefix: str) -> Prepared:
        """Return the generations that continue a text.

        Raises:
            ApiError: the request is refused.
        """
        return self._prepared(prompt_ids, parameters, prefix, PlainParser)

    def text_ids(self, prompt: str | tuple[int, ...], begins: bool) -> tuple[int, ...]:
        """Return a text as the model reads it, with the token that begins texts where the model wants one.

        Raises:
            ApiError: an id that the model does not have, or nothing at all.
        """
        tokenizer = self.backend.tokenizer
        if isinstance(prompt, str):
            bos = (tokenizer.bos_id,) if begins and tokenizer.adds_bos and tokenizer.bos_id is not None else ()
            ids = (*bos, *tokenizer.encode(prompt))
        else:
            ids = prompt
        if not ids:
            raise invalid("prompt", "Invalid 'prompt': it has no tokens.")
        if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise invalid("prompt", f"Invalid 'prompt': token ids go from 0 to {tokenizer.vocab_size - 1}.")
        return ids

    def start(self, prepared: Prepared) -> Run:
        """Submit prepared requests. To be called on the event loop.

        Raises:
            ApiError: the engine did not take them, or never would take so many at once.
        """
        # What `n` alone asks for too many was refused before, so here there are too many prompts.
        if len(prepared.requests) > self.backend.places:
            raise self._too_many("prompt")
        answers = [Answer(self.backend.tokenizer, reading) for reading in prepared.readings]
        return Run(self.backend, prepared.requests, answers, self.limits.cancel_wait_s)

    def check_model(self, model: str) -> None:
        """Check that a request names the served model.

        Raises:
            ApiError: 404.
        """
        if model != self.backend.model_id and model not in self.backend.aliases:
            raise model_not_found(model)

    def prompt(self, asked: Asked) -> Prompt:
        """Return a conversation as the model reads it.

        Raises:
            ApiError: the model is another one, or the conversation cannot be rendered.
        """
        self.check_model(asked.model)
        tools, style = asked.toolbox.tools, self._template.style
        variables = self._variables(asked)
        if not style.takes_tools and not self._format.tools_as_text and _uses_tools(asked):
            raise unsupported("tools", "The chat template of this model takes no tools.")
        try:
            turns = self._format.turns(asked.messages, tools, style)
            definitions = [tool.definition() for tool in tools] if style.takes_tools else []
            prompt = self._template.prompt(turns, definitions, variables)
        except MessagesRefused as error:
            raise invalid("messages", f"{error}.", "template_error") from error
        if not prompt.ids:
            raise invalid("messages", "The chat template made an empty prompt of these messages.", "template_error")
        return self._opened(prompt, asked.opening)

    def _opened(self, prompt: Prompt, text: str) -> Prompt:
        """Return the prompt with the answer's beginning, where the client gives one."""
        if not text:
            return prompt
        if not self._format.plain_answers or prompt.tail.rstrip().endswith(THINK):
            raise unsupported("messages", "This model's answers cannot be begun by the last message.")
        return Prompt([*prompt.ids, *self.backend.tokenizer.encode(text)], prompt.tail)

    def _variables(self, asked: Asked) -> Mapping[str, object]:
        named = self._template.style.variables - RESERVED
        for name in asked.variables:
            if name not in named:
                param = f"chat_template_kwargs.{name}"
                raise unsupported(param[:100], f"The chat template of this model does not read {name[:100]!r}.")
        effort = self._format.variables(asked.effort, self._template.style)
        if effort is None and asked.wished:
            effort = {}
        if effort is None:
            raise unsupported("reasoning_effort", f"This model cannot honour a reasoning effort of {asked.effort!r}.")
        return {**effort, **asked.variables}

    def _constraint(
        self, asked: Asked, parser: Callable[[], Parser], form_param: str
    ) -> Callable[[], TokenConstraint] | None:
        """Return what makes each generation's constraint; None where the answer is free."""
        tools, form, schema = asked.toolbox.tools, self._format, asked.schema
        tokenizer = self.backend.tokenizer
        if schema is not None:
            begin = self._grammar(partial(json_grammar, schema), form_param)
            if tools:
                begin = self._calls(tools, partial(form.forced_call, answer=schema))
            elif form.forces_whole_answers:
                whole = _known(form.forced_call((), schema), form_param, "be held to a schema")
                begin = self._grammar(lambda: lark_grammar(whole), form_param)
        elif asked.toolbox.required:
            begin = self._calls(tools, form.forced_call)
        elif any(tool.strict for tool in tools):
            # The arguments of the others are free as it is.
            begin = self._calls(_only_strict(tools), form.strict_call)
            return lambda: InCalls(begin, Listener(parser(), tokenizer), tokenizer)
        else:
            return None
        if form.forces_whole_answers:
            return begin
        return lambda: AfterReasoning(begin(), Listener(parser(), tokenizer))

    def _calls(
        self, tools: Sequence[Tool], grammar: Callable[[Sequence[Tool]], str | None]
    ) -> Callable[[], TokenConstraint]:
        """Return the constraint of a grammar of calls. A tool that is not strict may take any arguments instead.

        Raises:
            ApiError: 400, the strict ones cannot be followed.
        """
        # One by one: a grammar of several is tried only to where they differ.
        followed = [tool if self._can_be_followed(tool) else _free(tool) for tool in tools]
        loose = _only_strict(tools)
        try:
            return self._whole(grammar(followed))
        except ApiError:
            if followed == loose:
                raise
            # Together they may be too large.
            return self._whole(grammar(loose))

    def _whole(self, source: str | None) -> Callable[[], TokenConstraint]:
        known = _known(source, "tools", f"{STRICT} so large")
        return self._grammar(lambda: lark_grammar(known), "tools")

    def _can_be_followed(self, tool: Tool) -> bool:
        if tool.parameters == ANY_OBJECT:
            return True
        sources = self._format.trials(tool)
        if sources is None and tool.strict:
            raise unsupported("tools", f"This model's message format cannot {STRICT}: those of {tool.name!r}.")
        try:
            for source in sources or ():
                self._grammars.check(source)
        except GrammarRefused as error:
            if tool.strict:
                raise _no_grammar("tools", error, f"the schema of {tool.name!r}") from error
            return False
        return sources is not None

    def _grammar(self, grammar: Callable[[], str], param: str) -> Callable[[], TokenConstraint]:
        try:
            matcher = self._grammars.matcher(grammar())
        except GrammarRefused as error:
            raise _no_grammar(param, error) from error
        # Each generation has a state of its own.
        return lambda: GrammarConstraint(matcher.deep_copy())

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens an answer may have.

        Raises:
            ApiError: there is room for none.
        """
        room = self.backend.context_tokens - len(prompt_ids)
        if room < 1:
            raise _too_long(len(prompt_ids), self.backend.context_tokens)
        return room

    def _prepared(
        self,
        prompt_ids: Sequence[int],
        parameters: Parameters,
        prefix: str,
        parser: Callable[[], Parser],
        *,
        constrain: Callable[[], TokenConstraint] | None = None,
        one_call: bool = False,
    ) -> Prepared:
        room = self._room(prompt_ids)
        self._check_ids(parameters)
        if parameters.n > self.backend.places:
            raise self._too_many("n")
        name = f"{prefix}{uuid.uuid4().hex}"
        own_stops = frozenset() if parameters.ignore_eos else self.stop_ids
        first = GenerationRequest(
            request_id=name,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=room if parameters.max_tokens is None else min(room, parameters.max_tokens),
            sampling=parameters.sampling,
            stop_ids=own_stops | frozenset(parameters.stop_ids),
            constrain=constrain,
            deadline_s=parameters.deadline_s,
            open_ended=parameters.max_tokens is None,
        )
        more = [
            replace(first, request_id=f"{name}-{index}", sampling=derived(parameters.sampling, index))
            for index in range(1, parameters.n)
        ]
        readings = tuple(Reading(parser(), self._controls, parameters.stop, one_call) for _ in range(parameters.n))
        return Prepared((first, *more), readings)

    def _too_many(self, param: str) -> ApiError:
        places = self.backend.places
        return invalid(
            param,
            f"Invalid {param!r}: this node runs and queues {places} answers at most, of all requests together "
            "(--max-batch, --max-queue).",
        )

    def _check_ids(self, parameters: Parameters) -> None:
        size = self.backend.tokenizer.vocab_size
        biased = max((token for token, _ in parameters.sampling.logit_bias), default=0)
        for param, token in (("logit_bias", biased), ("stop_token_ids", max(parameters.stop_ids, default=0))):
            if token >= size:
                raise invalid(param, f"Invalid {param!r}: {token} is not a token of this model, which has {size}.")


def _uses_tools(asked: Asked) -> bool:
    return bool(asked.toolbox.tools) or any(turn.tool_calls or turn.role == "tool" for turn in asked.messages)


def _known(grammar: str | None, param: str, what: str) -> str:
    if grammar is None:
        raise unsupported(param, f"This model's message format cannot {what}.")
    return grammar


def _free(tool: Tool) -> Tool:
    return replace(tool, parameters=ANY_OBJECT)


def _only_strict(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools such that those that are not strict take any arguments."""
    return [tool if tool.strict else _free(tool) for tool in tools]


def _no_grammar(param: str, error: GrammarRefused, which: str = "its schema") -> ApiError:
    return invalid(param, f"Invalid {param!r}: no grammar can be made of {which}: {error}")


def derived(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of answer `index` of several: its seed follows from the request's, if that has one."""
    if sampling.seed is None or index == 0:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}/{index}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:8], "little"))


def _too_long(prompt_tokens: int, context_tokens: int) -> ApiError:
    message = (
        f"The prompt has {prompt_tokens} tokens and the context here holds {context_tokens}, "
        "of which the answer needs at least one."
    )
    return invalid("messages", message, "context_length_exceeded")
