"""POST /v1/completions: texts that the model continues, without a chat's turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from muser_decode.api.account import account, usage
from muser_decode.api.answer import TokenRecord
from muser_decode.api.answering import respond, served
from muser_decode.api.body import parse_object
from muser_decode.api.errors import ApiError, invalid
from muser_decode.api.fields import Fields, wrong_type
from muser_decode.api.limits import MAX_CHOICES, MAX_LOGPROBS
from muser_decode.api.logprobs import Spelling
from muser_decode.api.parameters import LENGTHS, Parameters, read_parameters, refuse_unsupported, with_logprobs
from muser_decode.api.preparing import Kitchen, Prepared
from muser_decode.api.run import Run
from muser_decode.api.schemas import read_model, stream_options
from muser_decode.api.shapes import Head, gather
from muser_decode.api.sse import DONE, comment, event
from muser_decode.formats.conversation import Content, Delta

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""

READ = LENGTHS | {"prompt", "add_special_tokens"}
"""What of the known fields a completion reads."""


@dataclass(frozen=True)
class CompletionRequest:
    """Texts to continue, as texts or as token ids, and how the answer is to be written."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    parameters: Parameters
    begins: bool
    stream: bool
    include_usage: bool
    progress: bool


def read_completion_request(body: dict[str, object]) -> CompletionRequest:
    """Return the request that a JSON object describes.

    Raises:
        ApiError: 400.
    """
    fields = Fields(body)
    refuse_unsupported(body, READ)
    stream = fields.boolean("stream") or False
    include_usage, progress = stream_options(fields, stream)
    parameters = with_logprobs(read_parameters(fields), fields.integer("logprobs", 0, MAX_LOGPROBS))
    prompts = _prompts(fields)
    if len(prompts) * parameters.n > MAX_CHOICES:
        raise invalid("prompt", f"Invalid 'prompt': all prompts' answers together are at most {MAX_CHOICES}.")
    if parameters.max_tokens is None:
        parameters = replace(parameters, max_tokens=DEFAULT_MAX_TOKENS)
    begins = fields.boolean("add_special_tokens")
    return CompletionRequest(
        read_model(fields), prompts, parameters, begins is not False, stream, include_usage, progress
    )


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    if value is None:
        raise fields.missing("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong_type("prompt", "a string or an array", value)
    if isinstance(value[0], int):
        return (read_ids("prompt", value),)
    return tuple(
        item if isinstance(item, str) else read_ids(f"prompt[{index}]", item) for index, item in enumerate(value)
    )


def read_ids(param: str, value: object) -> tuple[int, ...]:
    """Return an array of token ids; whether the model has them is checked where the model is known.

    Raises:
        ApiError: 400.
    """
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise wrong_type(param, "an array of token ids", value)
    return tuple(value)


class CompletionEndpoint:
    """Answers text completions for one backend."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen

    async def answer(self, request: Request) -> Response:
        """Answer one request. A client that goes away cancels its generations.

        Raises:
            ApiError: the request is refused or a generation failed.
        """
        return await served(request, self._kitchen.limits.max_body_nbytes, self._answer)

    async def _answer(self, request: Request, body: bytes) -> Response:
        wanted, prepared = await asyncio.to_thread(self.prepare, body)
        head = Head(prepared.id, int(time.time()), self._kitchen.backend.model_id)
        writer = CompletionWriter(head, self._kitchen.spelling, wanted)
        return await respond(request, self._kitchen, prepared, writer, stream=wanted.stream)

    def prepare(self, body: bytes) -> tuple[CompletionRequest, Prepared]:
        """Return what a request's body asks for. Touches no event loop.

        Raises:
            ApiError: the request is refused.
        """
        wanted = read_completion_request(parse_object(body))
        self._kitchen.check_model(wanted.model)
        parts = [
            self._kitchen.text(self._kitchen.text_ids(prompt, wanted.begins), wanted.parameters, "cmpl-")
            for prompt in wanted.prompts
        ]
        requests = tuple(request for part in parts for request in part.requests)
        return wanted, Prepared(requests, tuple(reading for part in parts for reading in part.readings))


class CompletionWriter:
    """Writes text completions, whole or streamed."""

    def __init__(self, head: Head, spelling: Spelling, wanted: CompletionRequest) -> None:
        self.id = head.id
        self.wants_progress = wanted.progress
        self._head = head.fields("text_completion")
        # OpenAI's streams that tell their usage say in every other chunk that it is not there yet.
        self._part = self._head | ({"usage": None} if wanted.include_usage else {})
        self._spelling, self._wanted = spelling, wanted
        self._shown: dict[int, int] = {}

    def opening(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        yield from ()

    def progress(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        seen = run.progress
        if self.wants_progress and seen is not None:
            part = {**self._part, "choices": [self._choice(0, "", None, None)]}
            yield event({**part, "muser": {"prefill": {"done": seen.done, "total": seen.total}}})
        else:
            yield comment(seen)

    def deltas(self, run: Run, index: int, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """See `Writer`."""
        text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        records = run.answers[index].take_records()
        if text or records:
            yield event({**self._part, "choices": [self._choice(index, text, self._logprobs(index, records), None)]})

    def ended(self, run: Run, index: int) -> Iterator[bytes]:
        """See `Writer`."""
        answer = run.answers[index]
        choice = self._choice(index, "", None, answer.finish_reason())
        yield event({**self._part, "choices": [choice], "muser": account(answer)})

    def closing(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        if self._wanted.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage(run)})
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """See `Writer`."""
        return event(error.body())

    async def whole(self, run: Run) -> dict[str, object]:
        """See `WholeWriter`."""
        choices = [
            self._choice(index, "".join(parts.content), self._logprobs(index, parts.records), answer.finish_reason())
            for index, (parts, answer) in enumerate(zip(await gather(run), run.answers, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage(run), "muser": account(run.answers[0])}

    def _usage(self, run: Run) -> dict[str, object]:
        """Return the figures of every prompt and answer together."""
        prompts = run.requests[:: self._wanted.parameters.n]
        return usage(sum(len(request.prompt_ids) for request in prompts), run.answers)

    def _logprobs(self, index: int, records: Sequence[TokenRecord]) -> dict[str, object] | None:
        """Return the likelihoods of the tokens shown next in one answer."""
        if not records:
            return None
        shown = self._shown.get(index, 0)
        self._shown[index] = shown + sum(record.chars for record in records)
        return self._spelling.legacy(records, shown)

    def _choice(
        self, index: int, text: str, logprobs: dict[str, object] | None, finish_reason: str | None
    ) -> dict[str, object]:
        """Return one answer, or a part of it."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
