"""One answer in the making: what the engine's events add up to. No IO."""

from __future__ import annotations

from collections.abc import Sequence

from muser_decode.api.stops import StopMatcher
from muser_decode.engine.request import Event, Failed, Finished, PrefillProgress, RouteReport, TokenEvent
from muser_decode.tokenizer import StreamDecoder, TokenBytes


class Answer:
    """Text, route and figures of one generation, fed with its events in order."""

    def __init__(self, tokenizer: TokenBytes, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stops)
        self.progress: PrefillProgress | None = None
        self.report: RouteReport | None = None
        self.finished: Finished | None = None
        self.failed: Failed | None = None
        self.tokens = 0

    def feed(self, event: Event) -> str:
        """Take one event; return the text that may now be shown."""
        if isinstance(event, TokenEvent):
            return self._token(event.token_id)
        if isinstance(event, Finished):
            self.finished = event
            return self._matcher.feed(self._decoder.finish()) + self._matcher.finish()
        if isinstance(event, PrefillProgress):
            self.progress = event
        elif isinstance(event, RouteReport):
            self.report = event
        else:
            self.failed = event
        return ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. The engine does not know and must be told to stop."""
        return self._matcher.matched

    @property
    def ended(self) -> bool:
        """Whether the engine has sent its last event."""
        return self.finished is not None or self.failed is not None

    @property
    def settled(self) -> bool:
        """Whether the route is known, or will never be."""
        return self.report is not None or self.ended

    def finish_reason(self) -> str:
        """Return OpenAI's word for the end of a complete answer."""
        if self.stopped or self.finished is None:
            return "stop"
        return self.finished.reason.value

    def usage(self, prompt_tokens: int) -> dict[str, object]:
        """Return OpenAI's usage object. Tokens that the engine made after a stop string do not count."""
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def account(self) -> dict[str, object] | None:
        """Return the `muser` object: how the answer came to be. None before the route is known.

        Times are in seconds. Those of the decode are null when the engine's closing figures did not come.
        """
        if self.report is None:
            return None
        report = self.report
        return {
            "route": report.route.value,
            "reason": report.reason,
            "handoff_id": report.handoff_id,
            "timings": self._timings(report),
            "remote_tokens": report.remote_tokens,
            "local_tokens": report.local_tokens,
            "segments_verified": report.segments_verified,
            "payload_bytes": report.payload_nbytes,
        }

    def _timings(self, report: RouteReport) -> dict[str, float | None]:
        end = self.finished
        return {
            "prefill_s": report.prefill_s,
            "wire_s": report.wire_s,
            "first_token_s": end.first_token_s if end else None,
            "decode_s": end.decode_s if end else None,
            "tokens_per_second": _rate(end) if end else None,
        }

    def _token(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self.tokens += 1
        return self._matcher.feed(self._decoder.feed(token_id))


def _rate(end: Finished) -> float | None:
    """Return tokens a second. `decode_s` begins with the complete cache, so the first token counts too."""
    if end.generated_tokens == 0 or end.decode_s <= 0:
        return None
    return end.generated_tokens / end.decode_s
