"""Items and events of a response, made of an answer's deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muser_decode.api.account import account, cached_tokens
from muser_decode.api.answering import unstreamed
from muser_decode.api.errors import ApiError
from muser_decode.api.logprobs import Spelling
from muser_decode.api.run import Run
from muser_decode.api.shapes import Head, new_id
from muser_decode.api.sse import comment, event
from muser_decode.api.tools import TEXT_INPUT
from muser_decode.formats.conversation import Call, CallDelta, CallPart, CallStart, Content, Delta, Reasoning

JsonObject = dict[str, object]


class ResponsesWriter:
    """Writes one response. Events carry the item that they belong to, by its place, and a running number."""

    wants_progress = False

    def __init__(
        self, head: Head, echoed: Mapping[str, object], spelling: Spelling, text_tools: frozenset[str] = frozenset()
    ) -> None:
        self.id = head.id
        self._text_tools = text_tools
        self._head, self._echoed, self._spelling = head, echoed, spelling
        self._items: list[JsonObject] = []
        self._open: JsonObject | None = None
        self._begun: JsonObject = {}
        self._is_text = False
        self._number = 0

    def opening(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def progress(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        yield comment(run.progress)

    def deltas(self, run: Run, index: int, deltas: Sequence[Delta]) -> Iterator[bytes]:
        """See `Writer`."""
        records = run.answers[index].take_records()
        for delta in deltas:
            if isinstance(delta, CallStart | CallPart | Call):
                yield from self._call(delta, _status(run))
                continue
            kind = "message" if isinstance(delta, Content) else "reasoning"
            yield from self._begin(kind)
            told = self._told(self._spelling.chat(records)) if records and kind == "message" else []
            records = []
            yield self._append(delta, told)

    def ended(self, run: Run, index: int) -> Iterator[bytes]:
        """See `Writer`."""
        yield from self._close(_status(run))

    def closing(self, run: Run) -> Iterator[bytes]:
        """See `Writer`."""
        whole = self._complete(run)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        """See `Writer`."""
        return self._event("error", code=error.reason, message=str(error), param=error.param)

    async def whole(self, run: Run) -> JsonObject:
        """See `WholeWriter`."""
        await unstreamed(run, self)
        return self._complete(run)

    def _complete(self, run: Run) -> JsonObject:
        answer = run.answers[0]
        status = _status(run)
        input_tokens = run.prompt_tokens
        usage = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens(answer)},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": input_tokens + answer.tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._response(status), "incomplete_details": details, "usage": usage, "muser": account(answer)}

    def _response(self, status: str) -> JsonObject:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": list(self._items),
            "usage": None,
            **self._echoed,
        }

    def _event(self, kind: str, /, **values: object) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return event(numbered, kind)

    def _begin(self, kind: str) -> Iterator[bytes]:
        """Open an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        item: JsonObject = {"id": new_id("msg_" if kind == "message" else "rs_"), "type": kind, "status": "in_progress"}
        shape: JsonObject = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open = {**item, **shape, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=self._open)
        part: JsonObject = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {**self._open, "content": [part]}
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _append(self, delta: Content | Reasoning, told: list[object]) -> bytes:
        part = self._part()
        part["text"] = f"{part['text']}{delta.text}"
        if isinstance(delta, Reasoning):
            return self._event("response.reasoning_text.delta", **self._place(), delta=delta.text)
        part["logprobs"] = [*_list(part["logprobs"]), *told]
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=told)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """Close the open item."""
        if self._open is None:
            return
        part, place = self._part(), self._place()
        if self._open["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", **place, text=part["text"])
        else:
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **place, part=part)
        yield from self._done({**self._open, "status": status})
        self._open = None

    def _call(self, delta: CallDelta, status: str) -> Iterator[bytes]:
        """Tell of a call, whose item is not open as others are: nothing comes between its start and its end."""
        if isinstance(delta, CallStart):
            yield from self._close()
            self._is_text = delta.name in self._text_tools
        if self._is_text:
            if isinstance(delta, Call):
                yield from self._text_call(delta, status)
            return
        if isinstance(delta, CallStart):
            names: JsonObject = {"id": new_id("fc_"), "type": "function_call", "call_id": new_id("call_")}
            self._begun = {**names, "name": delta.name, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._items), item=self._begun)
            return
        place: JsonObject = {"item_id": self._begun["id"], "output_index": len(self._items)}
        if isinstance(delta, CallPart):
            yield self._event("response.function_call_arguments.delta", **place, delta=delta.text)
            return
        told: JsonObject = {"name": delta.name, "arguments": delta.text}
        yield self._event("response.function_call_arguments.done", **place, **told)
        yield from self._done({**self._begun, **told, "status": status})

    def _text_call(self, call: Call, status: str) -> Iterator[bytes]:
        """Tell of a call whose input is a text, once it is whole."""
        text = call.arguments.get(TEXT_INPUT, "")
        names: JsonObject = {"id": new_id("ctc_"), "type": "custom_tool_call", "call_id": new_id("call_")}
        item: JsonObject = {**names, "name": call.name, "input": "", "status": "in_progress"}
        place: JsonObject = {"item_id": names["id"], "output_index": len(self._items)}
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        yield self._event("response.custom_tool_call_input.delta", **place, delta=text)
        yield self._event("response.custom_tool_call_input.done", **place, input=text)
        yield from self._done({**item, "input": text, "status": status})

    def _done(self, item: JsonObject) -> Iterator[bytes]:
        index = len(self._items)
        self._items.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _part(self) -> JsonObject:
        """Return the one part of the open item, to be added to."""
        content = _list((self._open or {}).get("content"))
        part = content[0] if content else {}
        return part if isinstance(part, dict) else {}

    def _place(self) -> JsonObject:
        """Return how events name the open item's part."""
        return {"item_id": (self._open or {}).get("id"), "output_index": len(self._items), "content_index": 0}

    @staticmethod
    def _told(logprobs: Mapping[str, object]) -> list[object]:
        return _list(logprobs["content"])


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _status(run: Run) -> str:
    """Return the status of what ends now: what the answer's length cut is incomplete."""
    answer = run.answers[0]
    return "incomplete" if answer.finished is not None and answer.finish_reason() == "length" else "completed"
