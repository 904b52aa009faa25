from __future__ import annotations

import pytest
from read_deltas import called, together

from muser_decode.api.account import account, usage
from muser_decode.api.answer import Answer, Reading
from muser_decode.engine.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Likelihood,
    PrefillProgress,
    Route,
    RouteReport,
    TokenEvent,
)
from muser_decode.formats.base import PlainParser
from muser_decode.formats.chatml_hermes import TAGS
from muser_decode.formats.conversation import Call, Content, Delta, Tool
from muser_decode.formats.tagged import TaggedParser

REPORT = RouteReport(Route.SALVAGED, "producer lost", 1.5, 0.5, 8, 3, 4, 1024, "h", producers=(("a:1", 5), ("b:1", 3)))
END = Finished(FinishReason.LENGTH, generated_tokens=5, first_token_s=2.0, decode_s=0.5)


class Bytes:
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def plain(*stops: str) -> Answer:
    return Answer(Bytes(), Reading(PlainParser(), {}, stops))


def hermes(*stops: str, one_call: bool = False) -> Answer:
    parser = TaggedParser([Tool("f")], TAGS, thinks=True, opened=False)
    return Answer(Bytes(), Reading(parser, {200: "<tool_call>", 201: "</tool_call>"}, stops, one_call))


def feed(answer: Answer, event: Event) -> str:
    """The text that an event shows, where it shows nothing else."""
    deltas = answer.feed(event)
    assert all(isinstance(delta, Content) for delta in deltas)
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def say(answer: Answer, text: str, probability: float | None = None) -> list[Delta]:
    told = None if probability is None else Likelihood(probability)
    return [delta for byte in text.encode() for delta in answer.feed(TokenEvent(byte, told))]


def test_events_add_up_to_text_and_figures() -> None:
    answer = plain()
    assert not answer.settled
    assert account(answer) is None
    assert feed(answer, PrefillProgress(4, 8)) == ""
    assert answer.progress == PrefillProgress(4, 8)
    assert feed(answer, REPORT) == ""
    assert (answer.settled, answer.ended) == (True, False)
    assert [feed(answer, TokenEvent(byte)) for byte in "aé!".encode()] == ["a", "", "é", "!"]
    assert feed(answer, TokenEvent(0xC3)) == ""
    assert feed(answer, END) == "\ufffd"
    assert (answer.ended, answer.finish_reason()) == (True, "length")
    assert usage(12, [answer]) == {
        "prompt_tokens": 12,
        "completion_tokens": 5,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert account(answer) == {
        "route": "salvaged",
        "reason": "producer lost",
        "handoff_id": "h",
        "deadline_reached": False,
        "timings": {
            "prefill_s": 1.5,
            "wire_s": 0.5,
            "first_token_s": 2.0,
            "decode_s": 0.5,
            # Five tokens in half a second.
            "tokens_per_second": 10.0,
            "tokens_by_origin": {
                "memory": 0,
                "disk": 0,
                "peer": 0,
                "remote_computed": 8,
                "local_computed": 3,
            },
        },
        "memory_tokens": 0,
        "disk_tokens": 0,
        "peer_tokens": 0,
        "remote_tokens": 8,
        "producers": {"a:1": 5, "b:1": 3},
        "local_tokens": 3,
        "held_reason": "",
        "held_decoded": False,
        "segments_verified": 4,
        "payload_bytes": 1024,
    }


def test_tokens_after_a_stop_string_neither_show_nor_count() -> None:
    answer = plain("##")
    feed(answer, REPORT)
    shown = "".join(feed(answer, TokenEvent(byte)) for byte in b"ab##cd")
    assert (shown, answer.stopped, answer.tokens) == ("ab", True, 4)
    assert feed(answer, Finished(FinishReason.CANCELLED, 6, 1.0, 1.0)) == ""
    assert answer.finish_reason() == "stop"


def test_text_held_for_a_stop_string_is_released_at_the_end() -> None:
    answer = plain("##")
    assert [feed(answer, TokenEvent(byte)) for byte in b"a#"] == ["a", ""]
    assert feed(answer, END) == "#"


def test_a_failure_ends_the_answer() -> None:
    answer = plain()
    assert feed(answer, Failed("broken")) == ""
    assert (answer.ended, answer.settled, answer.failed) == (True, True, Failed("broken"))


@pytest.mark.parametrize(("tokens", "decode_s"), [(0, 0.0), (0, 1.0), (2, 0.0)])
def test_no_rate_without_a_token_and_time(tokens: int, decode_s: float) -> None:
    answer = plain()
    feed(answer, REPORT)
    feed(answer, Finished(FinishReason.STOP, tokens, 1.0, decode_s))
    figures = account(answer)
    assert figures is not None
    assert figures["timings"]["tokens_per_second"] is None  # type: ignore[index]


def test_stop_strings_are_looked_for_in_what_the_user_sees() -> None:
    answer = hermes("##")
    assert say(answer, "<think>a ## b</think>c ## d")[-1] == Content(" ")
    assert (answer.stopped, answer.stop_string) == (True, "##")
    assert answer.reasoning_tokens > 0
    assert usage(1, [answer])["completion_tokens_details"] == {"reasoning_tokens": answer.reasoning_tokens}


def test_held_text_goes_out_before_a_call() -> None:
    answer = hermes("a##")
    deltas = say(answer, 'say a<tool_call>{"name": "f"}</tool_call>')
    assert together(deltas) == [Content("say a"), called("f", {})]
    answer.feed(Finished(FinishReason.STOP, 1, 1.0, 1.0))
    assert (answer.finish_reason(), answer.calls) == ("tool_calls", 1)


def test_an_answer_that_was_cut_off_says_so_whatever_it_called() -> None:
    answer = hermes()
    say(answer, '<tool_call>{"name": "f"}</tool_call><tool_call>')
    answer.feed(END)
    assert answer.finish_reason() == "length"


def test_a_call_that_the_length_cut_is_a_call_that_was_cut() -> None:
    answer = hermes()
    say(answer, '<tool_call>{"name": "f", "arguments": {"a": "b')
    (call,) = answer.feed(END)
    assert call == Call("f", {}, '{"a": "b')
    assert answer.finish_reason() == "length"


def test_one_call_ends_the_answer_where_only_one_is_wanted() -> None:
    answer = hermes(one_call=True)
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert together(say(answer, call + call)) == [called("f", {})]
    assert (answer.complete, answer.finish_reason()) == (True, "tool_calls")


def test_control_tokens_reach_the_parser_and_never_the_text() -> None:
    answer = hermes()
    answer.feed(TokenEvent(200))
    say(answer, '{"name": "f"}')
    assert together(answer.feed(TokenEvent(201))) == [called("f", {})]
    assert plain().feed(TokenEvent(65)) == [Content("A")]
    assert Answer(Bytes(), Reading(PlainParser(), {65: "<x>"})).feed(TokenEvent(65)) == []


def test_half_a_character_ends_at_a_control_token() -> None:
    answer = hermes()
    assert say(answer, "a")[-1] == Content("a")
    deltas = answer.feed(TokenEvent(0xE2)) + answer.feed(TokenEvent(200))
    deltas += say(answer, '{"name": "f"}')
    assert together(deltas + answer.feed(TokenEvent(201))) == [Content("\ufffd"), called("f", {})]


def test_likelihoods_are_released_with_their_text() -> None:
    answer = plain("xyz")
    say(answer, "abx", -0.5)
    assert [record.token_id for record in answer.take_records()] == [97, 98]
    assert answer.take_records() == []
    say(answer, "y", -0.5)
    assert answer.take_records() == []
    say(answer, "q", -0.5)
    assert [record.token_id for record in answer.take_records()] == [120, 121, 113]


def test_likelihoods_of_a_stop_string_are_not_told() -> None:
    answer = plain("xyz")
    say(answer, "abxyz", -0.5)
    answer.feed(END)
    assert [record.token_id for record in answer.take_records()] == [97, 98]


def test_likelihoods_of_held_text_come_at_the_end() -> None:
    answer = plain("xyz")
    say(answer, "\u00e9xy", -0.5)
    answer.feed(END)
    records = answer.take_records()
    assert [record.token_id for record in records] == [0xC3, 0xA9, 120, 121]
    assert [record.chars for record in records] == [0, 1, 1, 1]


@pytest.mark.parametrize(("tokens", "late"), [(0, True), (1, False)])
def test_an_answer_that_a_deadline_cuts_ends_like_one_that_is_too_long(tokens: int, *, late: bool) -> None:
    answer = plain()
    answer.feed(RouteReport(Route.LOCAL, "none", 0.1))
    for token in range(tokens):
        answer.feed(TokenEvent(token))
    answer.feed(Finished(FinishReason.DEADLINE, tokens, 0.0, 0.0))
    assert (answer.finish_reason(), answer.late) == ("length", late)
    figures = account(answer)
    assert figures is not None
    assert figures["deadline_reached"] is True
