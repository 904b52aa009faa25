from __future__ import annotations

import pytest

from muser_decode.api.answer import Answer
from muser_decode.engine.request import Failed, Finished, FinishReason, PrefillProgress, Route, RouteReport, TokenEvent

REPORT = RouteReport(Route.SALVAGED, "producer lost", 1.5, 0.5, 8, 3, 4, 1024, "h")
END = Finished(FinishReason.LENGTH, generated_tokens=5, first_token_s=2.0, decode_s=0.5)


class Bytes:
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_events_add_up_to_text_and_figures() -> None:
    answer = Answer(Bytes(), [])
    assert not answer.settled
    assert answer.account() is None
    assert answer.feed(PrefillProgress(4, 8)) == ""
    assert answer.progress == PrefillProgress(4, 8)
    assert answer.feed(REPORT) == ""
    assert (answer.settled, answer.ended) == (True, False)
    assert [answer.feed(TokenEvent(byte)) for byte in "aé!".encode()] == ["a", "", "é", "!"]
    assert answer.feed(TokenEvent(0xC3)) == ""
    assert answer.feed(END) == "\ufffd"
    assert (answer.ended, answer.finish_reason()) == (True, "length")
    assert answer.usage(prompt_tokens=12) == {
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer.account() == {
        "route": "salvaged",
        "reason": "producer lost",
        "handoff_id": "h",
        "timings": {
            "prefill_s": 1.5,
            "wire_s": 0.5,
            "first_token_s": 2.0,
            "decode_s": 0.5,
            # Five tokens in half a second.
            "tokens_per_second": 10.0,
        },
        "remote_tokens": 8,
        "local_tokens": 3,
        "segments_verified": 4,
        "payload_bytes": 1024,
    }


def test_tokens_after_a_stop_string_neither_show_nor_count() -> None:
    answer = Answer(Bytes(), ["##"])
    answer.feed(REPORT)
    shown = "".join(answer.feed(TokenEvent(byte)) for byte in b"ab##cd")
    assert (shown, answer.stopped, answer.tokens) == ("ab", True, 4)
    assert answer.feed(Finished(FinishReason.CANCELLED, 6, 1.0, 1.0)) == ""
    assert answer.finish_reason() == "stop"


def test_text_held_for_a_stop_string_is_released_at_the_end() -> None:
    answer = Answer(Bytes(), ["##"])
    assert [answer.feed(TokenEvent(byte)) for byte in b"a#"] == ["a", ""]
    assert answer.feed(END) == "#"


def test_a_failure_ends_the_answer() -> None:
    answer = Answer(Bytes(), [])
    assert answer.feed(Failed("broken")) == ""
    assert (answer.ended, answer.settled, answer.failed) == (True, True, Failed("broken"))


@pytest.mark.parametrize(("tokens", "decode_s"), [(0, 0.0), (0, 1.0), (2, 0.0)])
def test_no_rate_without_a_token_and_time(tokens: int, decode_s: float) -> None:
    answer = Answer(Bytes(), [])
    answer.feed(REPORT)
    answer.feed(Finished(FinishReason.STOP, tokens, 1.0, decode_s))
    account = answer.account()
    assert account is not None
    assert account["timings"]["tokens_per_second"] is None  # type: ignore[index]
