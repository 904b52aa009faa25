"""POST /v1/chat/completions: from bytes to a submitted generation, and the answer in one piece."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from muser_decode.api.answer import Answer
from muser_decode.api.backend import ChatBackend
from muser_decode.api.body import parse_object, read_body
from muser_decode.api.disconnect import unless_gone
from muser_decode.api.errors import ApiError, invalid
from muser_decode.api.limits import Limits
from muser_decode.api.models import model_not_found
from muser_decode.api.run import Run
from muser_decode.api.schemas import ChatRequest, read_chat_request
from muser_decode.api.shapes import Head, completion, route_headers
from muser_decode.api.stream import EventStream
from muser_decode.engine.request import GenerationRequest
from muser_decode.template import ChatTemplate, MessagesRefused

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A request that was understood: what the client asked, and what the engine is asked."""

    chat: ChatRequest
    generation: GenerationRequest


class ChatEndpoint:
    """Answers chats for one backend."""

    def __init__(self, backend: ChatBackend, template: ChatTemplate, limits: Limits) -> None:
        self._backend = backend
        self._template = template
        self._limits = limits

    async def answer(self, request: Request) -> Response:
        """Answer one request. A client that goes away cancels its generation.

        Raises:
            ApiError: the request is refused or its generation failed.
        """
        try:
            body = await read_body(request, self._limits.max_body_nbytes)
            # A long prompt takes a second to parse and tokenize; other answers go on meanwhile.
            prepared = await asyncio.to_thread(self.prepare, body)
            if prepared.chat.stream:
                return self._stream(prepared)
            return await unless_gone(request.receive, self._whole(prepared))
        except ClientDisconnect:
            log.info("client_gone")
            return Response(status_code=HTTPStatus.NO_CONTENT)

    def prepare(self, body: bytes) -> Prepared:
        """Return the generation that a request's body asks for. Touches no event loop.

        Prompt and answer share the context: an answer that reaches its end finishes with `length`,
        also where `max_tokens` would allow more.

        Raises:
            ApiError: the request is refused.
        """
        chat = read_chat_request(parse_object(body))
        if chat.model != self._backend.model_id and chat.model not in self._backend.aliases:
            raise model_not_found(chat.model)
        prompt = self._prompt(chat)
        room = self._backend.context_tokens - len(prompt)
        if room < 1:
            raise _too_long(len(prompt), self._backend.context_tokens)
        generation = GenerationRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_ids=tuple(prompt),
            max_new_tokens=room if chat.max_tokens is None else min(room, chat.max_tokens),
            sampling=chat.sampling,
            stop_ids=self._backend.tokenizer.eos_ids,
        )
        return Prepared(chat, generation)

    def _prompt(self, chat: ChatRequest) -> list[int]:
        messages = [
            {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
            for message in chat.messages
        ]
        try:
            prompt = self._template.render(messages)
        except MessagesRefused as error:
            raise invalid("messages", f"{error}.", "template_error") from error
        if not prompt:
            raise invalid("messages", "The chat template made an empty prompt of these messages.", "template_error")
        return prompt

    def _run(self, prepared: Prepared) -> Run:
        answer = Answer(self._backend.tokenizer, prepared.chat.stop)
        return Run(self._backend, prepared.generation, answer, self._limits.cancel_wait_s)

    def _head(self, prepared: Prepared) -> Head:
        return Head(prepared.generation.request_id, int(time.time()), self._backend.model_id)

    def _stream(self, prepared: Prepared) -> Response:
        return EventStream(
            partial(self._run, prepared),
            self._head(prepared),
            include_usage=prepared.chat.include_usage,
            limits=self._limits,
        )

    async def _whole(self, prepared: Prepared) -> Response:
        head = self._head(prepared)
        run = self._run(prepared)
        pieces: list[str] = []
        try:
            while not run.done:
                pieces.append(await run.advance())
        finally:
            run.cancel()
        run.log_answer()
        body = completion(head, run.answer, "".join(pieces), len(run.request.prompt_ids))
        return JSONResponse(body, headers=route_headers(run.answer))


def _too_long(prompt_tokens: int, context_tokens: int) -> ApiError:
    message = (
        f"The prompt has {prompt_tokens} tokens and the context of this model holds {context_tokens}, "
        "of which the answer needs at least one."
    )
    return invalid("messages", message, "context_length_exceeded")
