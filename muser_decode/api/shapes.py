"""The JSON that chat clients read: a completion, the chunks of a stream, and what both carry of ours."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muser_decode.api.account import account, usage
from muser_decode.api.answer import Answer, TokenRecord
from muser_decode.api.errors import ApiError
from muser_decode.api.logprobs import Spelling
from muser_decode.api.run import Run
from muser_decode.api.sse import DONE, comment, event
from muser_decode.formats.conversation import Call, CallPart, CallStart, Content, Delta, Reasoning

ROUTE_HEADER = "x-muser-route"


@dataclass(frozen=True)
class Head:
    """What every part of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, object]:
        """Return the leading fields of an object of this kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def route_headers(answer: Answer) -> dict[str, str]:
    """Return the header that names the route, if it is known."""
    return {} if answer.report is None else {ROUTE_HEADER: answer.report.route.value}


def new_id(prefix: str) -> str:
    """Return an id that no other object has."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


@dataclass
class Gathered:
    """The parts of one whole answer."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take what an event showed."""
        for delta in deltas:
            if isinstance(delta, Content):
                self.content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self.reasoning.append(delta.text)
            elif isinstance(delta, Call):
                self.calls.append(delta)


async def gather(run: Run) -> list[Gathered]:
    """Return every answer of a run, whole.

    Raises:
        ApiError: a generation failed. The others are stopped, as they are when the caller is cancelled.
    """
    gathered = [Gathered() for _ in run.answers]

    def take(index: int, deltas: Sequence[Delta]) -> None:
        gathered[index].add(deltas)
        gathered[index].records += run.answers[index].take_records()

    await run.drain(take)
    return gathered


def completion(head: Head, run: Run, gathered: Sequence[Gathered], spelling: Spelling) -> dict[str, object]:
    """Return whole answers."""
    return {
        **head.fields("chat.completion"),
        "choices": [
            _choice(index, answer, parts, spelling)
            for index, (answer, parts) in enumerate(zip(run.answers, gathered, strict=True))
        ],
        "usage": usage(run.prompt_tokens, run.answers),
        "muser": account(run.answers[0]),
    }


def _choice(index: int, answer: Answer, parts: Gathered, spelling: Spelling) -> dict[str, object]:
    content = "".join(parts.content)
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if parts.reasoning:
        message["reasoning_content"] = "".join(parts.reasoning)
    if parts.calls:
        message["content"] = content or None
        message["tool_calls"] = [call_object(call) for call in parts.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": spelling.chat(parts.records) if parts.records else None,
        "finish_reason": answer.finish_reason(),
    }


def call_object(call: Call) -> dict[str, object]:
    """Return a call as an assistant's message holds it."""
    return {"id": new_id("call_"), "type": "function", "function": {"name": call.name, "arguments": call.text}}


class ChatWriter:
    """Writes a chat completion, whole or in chunks."""

    def __init__(self, head: Head, spelling: Spelling, *, include_usage: bool, progress: bool) -> None:
        self.id = head.id
        self.wants_progress = progress
        self._head, self._spelling, self._include_usage = head, spelling, include_usage
        # OpenAI's streams that tell their usage say in every other chunk that it is not there yet.
        self._usage = {"usage": None} if include_usage else {}
        self._calls: dict[int, int] = {}

    def opening(self, run: Run) -> Iterator[bytes]:
        """Yield what comes first: each answer's role."""
        for index in range(len(run.answers)):
            yield event(self._chunk(index, {"role": "assistant", "content": ""}))

    def progress(self, run: Run) -> Iterator[bytes]:
        """Yield how far the prefill is: a chunk without content for clients that asked, else a comment."""
        seen = run.progress
        if self.wants_progress and seen is not None:
            yield event({**self._chunk(0, {}), "muser": {"prefill": {"done": seen.done, "total": seen.total}}})
        else:
            yield comment(seen)

    def deltas(self, run: Run, index: int, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """Yield what an event showed of one answer."""
        records = run.answers[index].take_records()
        for delta in deltas:
            if isinstance(delta, Call):
                # Everything of it was told.
                continue
            logprobs = self._spelling.chat(records) if records else None
            records = []
            yield event(self._chunk(index, self._delta(index, delta), logprobs=logprobs))
        if records:
            yield event(self._chunk(index, {}, logprobs=self._spelling.chat(records)))

    def ended(self, run: Run, index: int) -> Iterator[bytes]:
        """Yield the end of one answer, which may come before that of others."""
        answer = run.answers[index]
        last = self._chunk(index, {}, finish_reason=answer.finish_reason())
        yield event({**last, "muser": account(answer)})

    def closing(self, run: Run) -> Iterator[bytes]:
        """Yield what comes last."""
        if self._include_usage:
            figures = usage(run.prompt_tokens, run.answers)
            yield event({**self._head.fields("chat.completion.chunk"), "choices": [], "usage": figures})
        yield DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the event of a failure after the start."""
        return event(error.body())

    async def whole(self, run: Run) -> dict[str, object]:
        """See `WholeWriter`."""
        return completion(self._head, run, await gather(run), self._spelling)

    def _delta(self, index: int, delta: Content | Reasoning | CallStart | CallPart) -> dict[str, object]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallPart):
            return {"tool_calls": [{"index": self._calls[index] - 1, "function": {"arguments": delta.text}}]}
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        return {"tool_calls": [{"index": number, **call_object(Call(delta.name, {}, ""))}]}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        finish_reason: str | None = None,
        logprobs: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head.fields("chat.completion.chunk"), "choices": [choice], **self._usage}
