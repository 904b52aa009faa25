"""The figures of answers: OpenAI's usage, and the `muser` object that says how an answer came to be."""

from __future__ import annotations

from collections.abc import Sequence

from muser_decode.api.answer import Answer
from muser_decode.engine.request import Finished, FinishReason, RouteReport


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, object]:
    """Return OpenAI's usage object. Tokens that the engine made after a stop string do not count."""
    completion = sum(answer.tokens for answer in answers)
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answers[0])},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def cached_tokens(answer: Answer) -> int:
    """Return how many tokens of the prompt this node had before the request came."""
    return answer.report.held_tokens if answer.report else 0


def account(answer: Answer) -> dict[str, object] | None:
    """Return the `muser` object of one answer. None before the route is known.

    Times are in seconds. Those of the decode are null when the engine's closing figures did not come.
    """
    if answer.report is None:
        return None
    report = answer.report
    return {
        "route": report.route.value,
        "reason": report.reason,
        "handoff_id": report.handoff_id,
        "timings": _timings(report, answer.finished),
        "deadline_reached": answer.finished is not None and answer.finished.reason is FinishReason.DEADLINE,
        "memory_tokens": report.memory_tokens,
        "disk_tokens": report.disk_tokens,
        "peer_tokens": report.peer_tokens,
        "remote_tokens": report.remote_tokens,
        "producers": dict(report.producers),
        "local_tokens": report.local_tokens,
        "held_reason": report.held_reason,
        "held_decoded": report.held_decoded,
        "segments_verified": report.segments_verified,
        "payload_bytes": report.payload_nbytes,
    }


def _timings(report: RouteReport, end: Finished | None) -> dict[str, object]:
    return {
        "prefill_s": report.prefill_s,
        "wire_s": report.wire_s,
        "first_token_s": end.first_token_s if end else None,
        "decode_s": end.decode_s if end else None,
        "tokens_per_second": _rate(end) if end else None,
        "tokens_by_origin": report.tokens_by_origin,
    }


def _rate(end: Finished) -> float | None:
    """Return tokens a second. `decode_s` begins with the complete cache, so the first token counts too."""
    if end.generated_tokens == 0 or end.decode_s <= 0:
        return None
    return end.generated_tokens / end.decode_s
