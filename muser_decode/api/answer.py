"""One answer in the making: what the engine's events add up to. No IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muser_decode.api.stops import StopMatcher
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Likelihood,
    PrefillProgress,
    RouteReport,
    TokenEvent,
)
from muser_decode.formats.base import Parser, PlainParser
from muser_decode.formats.conversation import Call, Content, Delta, Reasoning
from muser_decode.tokenizer import StreamDecoder, TokenBytes


@dataclass(frozen=True)
class TokenRecord:
    """A token whose likelihood is reported; `chars` is how many characters it completed."""

    token_id: int
    likelihood: Likelihood
    chars: int


@dataclass(frozen=True)
class Reading:
    """How an answer is read: `controls` spells control tokens by id, `parser` makes deltas of text."""

    parser: Parser
    controls: Mapping[int, str]
    stops: Sequence[str] = ()
    one_call: bool = False


class Answer:
    """Deltas, route and figures of one generation, fed with its events in order.

    Stop strings are looked for in what the user sees. They end the answer, as a call does where only one
    is wanted; the engine does not know and must be told.
    """

    def __init__(self, tokenizer: TokenBytes, reading: Reading | None = None) -> None:
        self._reading = reading or Reading(PlainParser(), {})
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(self._reading.stops)
        self._records: list[TokenRecord] = []
        self._released: list[TokenRecord] = []
        self.progress: PrefillProgress | None = None
        self.report: RouteReport | None = None
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.tokens = 0
        self.reasoning_tokens = 0
        self.calls = 0

    def feed(self, event: Event) -> list[Delta]:
        """Take one event; return what may now be shown."""
        if isinstance(event, TokenEvent):
            return [] if self.stopped else self._token(event)
        if isinstance(event, Finished):
            self.finished = event
            return [] if self.stopped else self._end()
        if isinstance(event, PrefillProgress):
            self.progress = event
        elif isinstance(event, RouteReport):
            self.report = event
        else:
            self.failed = event
        return []

    def take_records(self) -> list[TokenRecord]:
        """Return the tokens whose text was shown since the last call, if likelihoods are reported."""
        taken, self._released = self._released, []
        return taken

    @property
    def stopped(self) -> bool:
        """Whether the answer is complete before the engine knows it."""
        return self._matcher.matched or (self._reading.one_call and self.calls > 0)

    @property
    def ended(self) -> bool:
        """Whether the engine has sent its last event."""
        return self.finished is not None or self.failed is not None

    @property
    def complete(self) -> bool:
        """Whether nothing more is to be shown."""
        return self.stopped or self.ended

    @property
    def late(self) -> bool:
        """Whether the deadline came before the first token."""
        return self.finished is not None and self.finished.reason is FinishReason.DEADLINE and not self.tokens

    @property
    def settled(self) -> bool:
        """Whether the route is known, or will never be."""
        return self.report is not None or self.ended

    def finish_reason(self) -> str:
        """Return OpenAI's word for the end of a complete answer."""
        reason = "stop" if self.stopped or self.finished is None else self.finished.reason.value
        if reason == FinishReason.DEADLINE.value:
            # The word that clients have for an answer that was cut.
            reason = FinishReason.LENGTH.value
        return "tool_calls" if self.calls and reason == "stop" else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.found

    def _token(self, event: TokenEvent) -> list[Delta]:
        self.tokens += 1
        parser = self._reading.parser
        spelling = self._reading.controls.get(event.token_id)
        if spelling is None:
            text = self._decoder.feed(event.token_id)
            told = parser.feed(text)
        else:
            # A control token ends the text before it, half a character included.
            text = self._decoder.finish()
            told = [*parser.feed(text), *parser.control(spelling)]
        if event.likelihood is not None:
            self._records.append(TokenRecord(event.token_id, event.likelihood, len(text)))
        deltas = self._matched(told)
        self.reasoning_tokens += any(isinstance(delta, Reasoning) for delta in deltas)
        if self.stopped:
            self._release(self._matcher.removed)
        elif deltas:
            self._release(parser.held + self._matcher.held)
        return deltas

    def _end(self) -> list[Delta]:
        parser = self._reading.parser
        deltas = self._matched([*parser.feed(self._decoder.finish()), *parser.finish()])
        if not self.stopped:
            deltas += self._flushed()
        self._release(self._matcher.removed)
        return deltas

    def _matched(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Pass content through the stop strings; what they hold goes out before anything else does."""
        shown: list[Delta] = []
        for delta in deltas:
            if self.stopped:
                break
            if isinstance(delta, Content):
                text = self._matcher.feed(delta.text)
                shown += [Content(text)] if text else []
                continue
            shown += self._flushed()
            shown.append(delta)
            self.calls += isinstance(delta, Call)
        return shown

    def _flushed(self) -> list[Delta]:
        held = self._matcher.finish()
        return [Content(held)] if held else []

    def _release(self, withheld: int) -> None:
        """Release the records of tokens, but for those at the end that lie within `withheld` characters."""
        keep = len(self._records)
        while keep and withheld and self._records[keep - 1].chars <= withheld:
            keep -= 1
            withheld -= self._records[keep].chars
        self._released += self._records[:keep]
        self._records = self._records[keep:]
