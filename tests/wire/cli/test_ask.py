from __future__ import annotations

import pytest

from muser_wire.cli.ask import Answer, AskFailed, Endpoint, error_text, events, read_answer


def test_events_end_at_the_mark_and_skip_what_is_not_data() -> None:
    lines = [
        b": hello\n",
        b'data: {"a": 1}\r\n',
        b"\n",
        b"event: x\n",
        b'data:{"a": 2}\n',
        b"data: [DONE]\n",
        b'data: {"a": 3}\n',
    ]
    assert list(events(lines)) == [{"a": 1}, {"a": 2}]


def test_a_stream_without_its_end_mark_is_a_failure() -> None:
    with pytest.raises(AskFailed, match="broke off"):
        list(events([b'data: {"a": 1}\n']))


def test_an_error_event_is_a_failure_with_its_message() -> None:
    with pytest.raises(AskFailed, match="out of luck"):
        list(events([b'data: {"error": {"message": "out of luck"}}\n', b"data: [DONE]\n"]))


def test_an_event_that_is_not_json_is_a_failure() -> None:
    with pytest.raises(AskFailed, match="not JSON"):
        list(events([b"data: {\n"]))


def test_chunks_add_up_and_each_piece_is_shown_once() -> None:
    seen: list[str] = []
    chunks: list[dict[str, object]] = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Good "}}], "usage": None},
        {"choices": [{"delta": {"content": "day"}}]},
        {"choices": [], "usage": {"prompt_tokens": 3}, "muser": {"route": "salvaged", "reason": "seal"}},
    ]
    answer = read_answer(chunks, seen.append)
    assert seen == ["Good ", "day"]
    assert answer == Answer("Good day", {"route": "salvaged", "reason": "seal"}, {"prompt_tokens": 3})
    assert (answer.route, answer.reason) == ("salvaged", "seal")


def test_an_answer_without_an_account_has_no_known_route() -> None:
    assert (Answer("x").route, Answer("x").reason) == ("unknown", "")


def test_an_error_that_is_not_openai_s_is_quoted() -> None:
    assert error_text(b"<html>" + b"x" * 500) == "<html>" + "x" * 194


def test_nobody_listening_is_named(free_port: int) -> None:
    with pytest.raises(AskFailed, match=r"GET /v1/models: .*refused"):
        Endpoint(free_port).model_id()
