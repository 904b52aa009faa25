"""The JSON that chat clients read: a completion, the chunks of a stream, and what both carry of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muser_decode.api.answer import Answer

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


def completion(head: Head, answer: Answer, text: str, prompt_tokens: int) -> dict[str, object]:
    """Return a whole answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": answer.finish_reason(),
    }
    return {
        **head.fields("chat.completion"),
        "choices": [choice],
        "usage": answer.usage(prompt_tokens),
        "muser": answer.account(),
    }


def chunk(head: Head, delta: Mapping[str, object], finish_reason: str | None = None) -> dict[str, object]:
    """Return one part of a stream."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {**head.fields("chat.completion.chunk"), "choices": [choice]}


def usage_chunk(head: Head, answer: Answer, prompt_tokens: int) -> dict[str, object]:
    """Return the part that ends a stream whose client asked for usage."""
    return {**head.fields("chat.completion.chunk"), "choices": [], "usage": answer.usage(prompt_tokens)}
