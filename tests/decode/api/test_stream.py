from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from muser_decode.api.limits import Limits
from muser_decode.engine.request import Failed, Finished, FinishReason, PrefillProgress, TokenEvent

if TYPE_CHECKING:
    from muser_decode.engine.request import EventSink, GenerationRequest


def deltas(events: list[Any]) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events if isinstance(event, dict) and event.get("choices")]


def text(events: list[Any]) -> str:
    return "".join(delta.get("content", "") for delta in deltas(events))


def test_a_stream_from_role_to_done(kit: Any) -> None:
    response = kit.caller().chat(stream=True)
    events = kit.sse(response)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-muser-route"] == "remote"
    assert "content-length" not in response.headers
    assert deltas(events) == [{"role": "assistant", "content": ""}, *({"content": char} for char in "Hello"), {}]
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (kit.backend.requests[0].request_id, "chat.completion.chunk", chunks[0]["created"], "tiny")
    }
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 6 + ["stop"]
    assert all(c["choices"][0]["index"] == 0 for c in chunks)
    assert ["muser" in c for c in chunks] == [False] * 6 + [True]
    assert chunks[-1]["muser"] == kit.caller().chat().json()["muser"]
    assert not any("usage" in c for c in chunks)


def test_usage_comes_last_when_asked_for(kit: Any) -> None:
    events = kit.sse(kit.caller().chat(stream=True, stream_options={"include_usage": True}))
    whole = kit.caller().chat().json()
    assert events[-1] == "[DONE]"
    assert (events[-2]["choices"], events[-2]["usage"]) == ([], whole["usage"])
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    # Every other chunk says that it is not there yet.
    assert [event["usage"] for event in events[:-2]] == [None] * 7


def test_characters_and_stop_strings_are_never_cut(kit: Any) -> None:
    kit.backend.script = kit.saying("né 😀 <st>op<stop> more")
    events = kit.sse(kit.caller().chat(stream=True, stop=["<stop>"]))
    pieces = [delta["content"] for delta in deltas(events) if delta.get("content")]
    assert "".join(pieces) == "né 😀 <st>op"
    assert "é" in pieces
    assert "😀" in pieces
    assert "<st>" in pieces
    assert kit.backend.cancels[0].asked.is_set()
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_held_text_is_released_at_the_end(kit: Any) -> None:
    kit.backend.script = kit.saying("so <sto", FinishReason.LENGTH)
    events = kit.sse(kit.caller().chat(stream=True, stop=["<stop>"]))
    assert text(events) == "so <sto"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_an_answer_without_tokens_is_a_stream_too(kit: Any) -> None:
    kit.backend.script = kit.saying("")
    events = kit.sse(kit.caller().chat(stream=True))
    assert deltas(events) == [{"role": "assistant", "content": ""}, {}]
    assert events[-2]["muser"]["timings"]["tokens_per_second"] is None


def test_the_beginning_goes_out_at_once_and_the_route_stands_at_the_end(kit: Any) -> None:
    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        time.sleep(0.5)
        sink(PrefillProgress(1024, 4096))
        time.sleep(0.3)
        kit.saying("ok")(request, sink, cancel)

    kit.backend.script = play
    began = time.monotonic()
    # The wait for the route is the server's own.
    response = kit.caller(Limits(comment_every_s=0.15)).chat(stream=True)
    events = kit.sse(response)
    assert response.status_code == 200
    assert "x-muser-route" not in response.headers
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    comments = [event for event in events if isinstance(event, str) and event.startswith(":")]
    assert events[1] == comments[0] == ": waiting"
    assert ": prefilling 1024/4096" in comments
    # One for each 0.15 s at most, whatever the number of events.
    assert 2 <= len(comments) <= (time.monotonic() - began) / 0.15
    assert text(events) == "ok"
    assert events[-2]["muser"]["route"] == "remote"


@pytest.mark.parametrize("slow_s", [0.0, 0.4], ids=["before the headers", "after them"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_is_streamed_and_ended_while_another_one_s_prompt_is_prefilled(
    kit: Any, path: str, slow_s: float
) -> None:
    """The second answer is over before the first one's route is known, and nothing of it comes after its end."""
    second = threading.Event()

    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        if request is kit.backend.requests[0]:
            assert second.wait(10)
            time.sleep(slow_s)
        kit.saying("first" if request is kit.backend.requests[0] else "second")(request, sink, cancel)
        second.set()

    kit.backend.script = play
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2} if "chat" in path else {"prompt": ["a", "b"]}
    events = kit.sse(kit.caller(Limits(header_wait_s=0.2)).call(path, stream=True, **body))
    choices = [event["choices"][0] for event in events if isinstance(event, dict)]
    said = ["", ""]
    for one in choices:
        said[one["index"]] += one.get("delta", one).get("content") or one.get("text") or ""
    assert said == ["first", "second"]
    ends = [place for place, one in enumerate(choices) if one["finish_reason"]]
    assert [choices[place]["index"] for place in ends] == [1, 0]
    assert all(one["index"] == 0 for one in choices[ends[0] + 1 :])
    assert events[-1] == "[DONE]"


def test_many_progress_events_do_not_make_many_comments(kit: Any) -> None:
    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        for done in range(100):
            sink(PrefillProgress(done, 100))
            time.sleep(0.002)
        kit.saying("ok")(request, sink, cancel)

    kit.backend.script = play
    response = kit.caller(Limits(header_wait_s=0.0, comment_every_s=5.0)).chat(stream=True)
    assert not any(isinstance(event, str) and event.startswith(":") for event in kit.sse(response))


@pytest.mark.parametrize("last", [Failed("device lost"), Finished(FinishReason.CANCELLED, 2, 0.1, 0.1)])
def test_a_failure_after_the_start_is_an_event_and_the_end(kit: Any, last: Any) -> None:
    def play(_request: GenerationRequest, sink: EventSink, _cancel: Any) -> None:
        sink(kit.report)
        sink(TokenEvent(ord("a")))
        sink(last)

    kit.backend.script = play
    caller = kit.caller()
    response = caller.chat(stream=True)
    events = kit.sse(response)
    assert response.status_code == 200
    assert text(events) == "a"
    failed = isinstance(last, Failed)
    assert events[-1] == {
        "error": {
            "message": "device lost" if failed else "The server stopped this generation.",
            "type": "server_error",
            "param": None,
            "code": "generation_failed" if failed else "cancelled",
        }
    }
    assert "[DONE]" not in events
    kit.backend.script = kit.saying("fine")
    assert text(kit.sse(caller.chat(stream=True))) == "fine"


def test_an_internal_failure_after_the_start_is_an_event_without_details(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(token_id: int) -> bytes:
        # The letter "H", 72, gives a text that no line of source holds.
        raise LookupError(f"of {token_id * 2} letters")

    kit.backend.tokenizer.token_bytes = break_down
    events = kit.sse(kit.caller().chat(stream=True))
    assert events[-1]["error"]["code"] == "internal_error"
    assert "of 144" not in str(events)
    assert "request_failed error=LookupError" in caplog.text
    assert "of 144" not in caplog.text
    # The engine is told, since nobody reads its events any more.
    assert kit.backend.cancels[0].asked.is_set()


def test_progress_comes_in_chunks_to_clients_that_ask(kit: Any) -> None:
    def play(request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        for done in (0, 1024, 2048):
            sink(PrefillProgress(done, 4096))
            time.sleep(0.12)
        kit.saying("ok")(request, sink, cancel)

    kit.backend.script = play
    limits = Limits(header_wait_s=60.0, comment_every_s=60.0, progress_every_s=0.1)
    response = kit.caller(limits).chat(stream=True, stream_options={"progress": True})
    events = kit.sse(response)
    # The headers did not wait for the route.
    assert "x-muser-route" not in response.headers
    told = [event["muser"]["prefill"] for event in events[:-1] if "prefill" in event.get("muser", {})]
    assert {"done": 1024, "total": 4096} in told
    for event in events[:-1]:
        if "prefill" in event.get("muser", {}):
            assert event["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    assert text(events) == "ok"


def test_calls_and_reasoning_are_streamed(kit: Any) -> None:
    kit.backend.tokenizer.chat_template += "{# <think> #}"
    kit.backend.script = kit.saying('<think>hm</think>a<tool_call>{"name": "f"}</tool_call>')
    tools = [{"type": "function", "function": {"name": "f"}}]
    events = kit.sse(kit.caller().chat(stream=True, tools=tools))
    assert "".join(delta.get("reasoning_content", "") for delta in deltas(events)) == "hm"
    assert text(events) == "a"
    first, second = [delta["tool_calls"] for delta in deltas(events) if "tool_calls" in delta]
    assert first[0].pop("id").startswith("call_")
    assert first == [{"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}]
    assert second == [{"index": 0, "function": {"arguments": "{}"}}]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    whole = kit.caller().chat(tools=tools).json()["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("hm", "a")
    assert whole["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_arguments_are_streamed_while_the_model_writes_them(kit: Any) -> None:
    body = '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'
    kit.backend.script = kit.saying(body * 2)
    tools = [{"type": "function", "function": {"name": "f"}}]
    events = kit.sse(kit.caller().chat(stream=True, tools=tools))
    calls = [call for delta in deltas(events) for call in delta.get("tool_calls", [])]
    for index in range(2):
        own = [call for call in calls if call["index"] == index]
        # Each token of the text is told when it comes; id and name stand in the first piece alone.
        assert [set(call) for call in own] == [{"index", "id", "type", "function"}] + [{"index", "function"}] * 10
        assert "".join(call["function"]["arguments"] for call in own) == '{"city": "Oslo"}'
        assert [call["function"].get("name") for call in own] == ["f"] + [None] * 10
    assert len({call["id"] for call in calls if "id" in call}) == 2
    whole = kit.caller().chat(tools=tools).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in whole] == ['{"city": "Oslo"}'] * 2


def test_a_call_that_was_cut_is_told_as_far_as_it_came(kit: Any) -> None:
    kit.backend.script = kit.saying('<tool_call>{"name": "f", "arguments": {"city": "Os', FinishReason.LENGTH)
    tools = [{"type": "function", "function": {"name": "f"}}]
    events = kit.sse(kit.caller().chat(stream=True, tools=tools))
    calls = [call for delta in deltas(events) for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Os'
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    choice = kit.caller().chat(tools=tools).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Os'}
    assert choice["finish_reason"] == "length"
