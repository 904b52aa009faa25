"""Blocks and events of Anthropic's API, made of an answer's deltas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from muser_decode.api.account import account, cached_tokens
from muser_decode.api.answer import Answer
from muser_decode.api.answering import unstreamed
from muser_decode.api.errors import ApiError
from muser_decode.api.run import Run
from muser_decode.api.shapes import new_id
from muser_decode.api.sse import comment, event
from muser_decode.formats.conversation import Call, CallPart, CallStart, Content, Delta

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

JsonObject = dict[str, object]


class MessagesWriter:
    """Writes one message."""

    wants_progress = False

    def __init__(self, name: str, model: str, error_body: Callable[[ApiError], Mapping[str, object]]) -> None:
        self.id = name
        self._model, self._error_body = model, error_body
        self._blocks: list[JsonObject] = []
        self._open = False

    def opening(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        usage = {"input_tokens": run.prompt_tokens, "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event({"type": "message_start", "message": message}, "message_start")

    def progress(self, run: Run) -> Iterator[bytes]:
        """See `Writer`. Clients of this API know pings."""
        yield comment(run.progress)
        yield event({"type": "ping"}, "ping")

    def deltas(self, run: Run, index: int, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """See `Writer`."""
        for delta in deltas:
            if isinstance(delta, CallStart):
                yield from self._begin({"type": "tool_use", "id": new_id("toolu_"), "name": delta.name, "input": {}})
            elif isinstance(delta, CallPart):
                yield self._delta({"type": "input_json_delta", "partial_json": delta.text})
            elif isinstance(delta, Call):
                self._blocks[-1]["input"] = dict(delta.arguments)
                yield from self._close()
            elif isinstance(delta, Content):
                yield from self._text("text", delta.text)
            else:
                yield from self._text("thinking", delta.text)

    def ended(self, run: Run, index: int) -> Iterator[bytes]:
        """See `Writer`."""
        yield from self._close()

    def closing(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        answer = run.answers[0]
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(run, answer), "muser": account(answer)}
        yield event(last, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def failed(self, error: ApiError) -> bytes:
        """See `Writer`."""
        return event(self._error_body(error), "error")

    async def whole(self, run: Run) -> JsonObject:
        """See `WholeWriter`."""
        await unstreamed(run, self)
        answer = run.answers[0]
        return {
            **self._head(),
            "content": self._blocks,
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_string,
            "usage": _usage(run, answer),
            "muser": account(answer),
        }

    def _head(self) -> JsonObject:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._open or self._blocks[-1]["type"] != kind:
            empty: JsonObject = {"type": kind, kind: ""}
            yield from self._begin({**empty, "signature": ""} if kind == "thinking" else empty)
        block = self._blocks[-1]
        block[kind] = f"{block[kind]}{text}"
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: JsonObject) -> Iterator[bytes]:
        yield from self._close()
        self._open = True
        self._blocks.append(block)
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}
        yield event(start, "content_block_start")

    def _delta(self, delta: JsonObject) -> bytes:
        part = {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
        return event(part, "content_block_delta")

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = False
            yield event({"type": "content_block_stop", "index": len(self._blocks) - 1}, "content_block_stop")


def _stop_reason(answer: Answer) -> str:
    if answer.stop_string is not None:
        return "stop_sequence"
    return _REASONS.get(answer.finish_reason(), "end_turn")


def _usage(run: Run, answer: Answer) -> JsonObject:
    """Return the figures of this API, which counts tokens that were held here apart from the others."""
    held = cached_tokens(answer)
    return {
        "input_tokens": run.prompt_tokens - held,
        "cache_read_input_tokens": held,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.tokens,
    }
