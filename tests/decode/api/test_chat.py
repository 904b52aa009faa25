from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from muser_decode.api.limits import Limits
from muser_decode.engine.request import (
    Failed,
    Finished,
    FinishReason,
    Route,
    RouteReport,
    SamplingParams,
    TokenEvent,
)
from muser_decode.errors import EngineBusy, EngineStopped, RequestInvalid

if TYPE_CHECKING:
    import httpx

    from muser_decode.engine.request import EventSink, GenerationRequest

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
# Three control tokens count as one each.
PROMPT_TOKENS = len(PROMPT) - len("<|im_start|>") * 2 - len("<|im_end|>") + 3


def refused(response: httpx.Response, status: int, reason: str, param: str | None = None) -> str:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (reason, param)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "Traceback" not in response.text
    return str(error["message"])


def test_an_answer_in_one_piece(kit: Any) -> None:
    response = kit.caller().chat()
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-muser-route"] == "remote"
    assert body.pop("id").startswith("chatcmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 5,
            "total_tokens": PROMPT_TOKENS + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "muser": {
            "route": "remote",
            "reason": "",
            "handoff_id": "h-1",
            "deadline_reached": False,
            "timings": {
                "prefill_s": 0.5,
                "wire_s": 0.25,
                "first_token_s": 0.75,
                "decode_s": 2.0,
                "tokens_per_second": 2.5,
                "tokens_by_origin": {
                    "memory": 0,
                    "disk": 0,
                    "peer": 0,
                    "remote_computed": 20,
                    "local_computed": 0,
                },
            },
            "memory_tokens": 0,
            "disk_tokens": 0,
            "peer_tokens": 0,
            "remote_tokens": 20,
            "producers": {},
            "local_tokens": 0,
            "held_reason": "",
            "held_decoded": False,
            "segments_verified": 6,
            "payload_bytes": 4096,
        },
    }


def test_what_the_engine_is_asked(kit: Any) -> None:
    response = kit.caller().chat(temperature=0, top_k=5, seed=9, max_tokens=3)
    (asked,) = kit.backend.requests
    assert asked.request_id == response.json()["id"]
    assert asked.prompt_ids == (257, *b"user\nHi", 258, *b"\n", 257, *b"assistant\n")
    assert asked.max_new_tokens == 3
    assert asked.sampling == SamplingParams(temperature=0.0, top_k=5, seed=9)
    assert asked.stop_ids == frozenset({258})


def test_an_alias_is_answered_under_the_served_name(kit: Any) -> None:
    assert kit.caller().chat(model="gpt-tiny").json()["model"] == "tiny"


def test_another_model_is_not_found(kit: Any) -> None:
    message = refused(kit.caller().chat(model="gpt-9"), 404, "model_not_found", "model")
    assert "gpt-9" in message
    assert kit.backend.requests == []


def test_the_answer_ends_with_the_context(kit: Any) -> None:
    kit.backend.context_tokens = PROMPT_TOKENS + 4
    kit.backend.script = kit.saying("Hell", FinishReason.LENGTH)
    response = kit.caller().chat(max_tokens=1000)
    assert kit.backend.requests[0].max_new_tokens == 4
    assert response.json()["choices"][0]["finish_reason"] == "length"
    kit.caller().chat()
    assert kit.backend.requests[1].max_new_tokens == 4


def test_a_prompt_that_leaves_one_token_is_taken(kit: Any) -> None:
    kit.backend.context_tokens = PROMPT_TOKENS + 1
    assert kit.caller().chat().status_code == 200
    assert kit.backend.requests[0].max_new_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(kit: Any, stream: bool) -> None:
    kit.backend.context_tokens = PROMPT_TOKENS
    message = refused(kit.caller().chat(stream=stream), 400, "context_length_exceeded", "messages")
    assert f"{PROMPT_TOKENS} tokens" in message
    assert f"holds {PROMPT_TOKENS}," in message
    kit.backend.context_tokens = 11
    assert "holds 11," in refused(kit.caller().chat(stream=stream), 400, "context_length_exceeded", "messages")
    assert kit.backend.requests == []


def test_a_stop_string_ends_the_answer_and_the_generation(kit: Any) -> None:
    kit.backend.script = kit.saying("one STOP two " * 1000)
    response = kit.caller().chat(stop=["STOP"])
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    # "one STOP" is eight tokens; what the engine made after it does not count.
    assert response.json()["usage"]["completion_tokens"] == 8
    assert kit.backend.cancels[0].asked.is_set()
    assert response.json()["muser"]["timings"]["decode_s"] == 2.0


def test_an_engine_that_does_not_close_costs_the_figures_and_not_the_answer(kit: Any) -> None:
    def play(_request: GenerationRequest, sink: EventSink, cancel: Any) -> None:
        sink(kit.report)
        sink(TokenEvent(ord("#")))

    kit.backend.script = play
    body = kit.caller(Limits(cancel_wait_s=0.05)).chat(stop="#").json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["muser"]["route"] == "remote"
    assert body["muser"]["timings"] == {
        "prefill_s": 0.5,
        "wire_s": 0.25,
        "first_token_s": None,
        "decode_s": None,
        "tokens_per_second": None,
        "tokens_by_origin": {"memory": 0, "disk": 0, "peer": 0, "remote_computed": 20, "local_computed": 0},
    }


def test_text_that_is_no_utf8_shows_as_replacement_characters(kit: Any) -> None:
    kit.backend.script = kit.saying(b"a\xff\xe2\x82")
    assert kit.caller().chat().json()["choices"][0]["message"]["content"] == "a\ufffd\ufffd"


def test_route_and_reason_of_a_local_answer(kit: Any) -> None:
    report = RouteReport(Route.LOCAL, "no producer", prefill_s=1.0, local_tokens=25)
    kit.backend.script = kit.saying("x", report=report)
    response = kit.caller().chat()
    assert response.headers["x-muser-route"] == "local"
    assert (response.json()["muser"]["route"], response.json()["muser"]["reason"]) == ("local", "no producer")


BAD_BODIES: list[tuple[bytes, int, str, str | None]] = [
    (b"", 400, "invalid_json", None),
    (b"{", 400, "invalid_json", None),
    (b"[]", 400, "invalid_json", None),
    (b'{"model": NaN}', 400, "invalid_json", None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json", None),
    (b'{"x": "\\udc00", "model": "tiny", "messages": []}', 400, "invalid_json", None),
    (b'{"model": "\xff"}', 400, "invalid_json", None),
    (b"[" * 100_000, 400, "invalid_json", None),
    (b'{"a":' * 100_000, 400, "invalid_json", None),
    (b"{}", 400, "missing_required_parameter", "model"),
    (b'{"model": "tiny"}', 400, "missing_required_parameter", "messages"),
    (b'{"model": "tiny", "messages": {}}', 400, "invalid_type", "messages"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": 1}]}', 400, "invalid_type", "messages[0].content"),
    (b'{"model": ["tiny"], "messages": []}', 400, "invalid_type", "model"),
    (b'{"best_of": 3, "model": "tiny", "messages": []}', 400, "unsupported_parameter", "best_of"),
    (b'{"model": "tiny", "model": 5, "messages": []}', 400, "invalid_type", "model"),
    (b'{"pad": "' + b"x" * 5000 + b'"}', 413, "request_too_large", None),
]


@pytest.mark.parametrize(("body", "status", "reason", "param"), BAD_BODIES)
def test_a_bad_body_is_refused_and_the_next_request_works(
    kit: Any, body: bytes, status: int, reason: str, param: str | None
) -> None:
    limit = 5000 if status == 413 else 10**6
    caller = kit.caller(Limits(max_body_nbytes=limit))
    refused(caller.post(body), status, reason, param)
    assert kit.backend.requests == []
    assert caller.chat().json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "reason", "retry"),
    [
        (EngineBusy("9 requests wait"), 503, "overloaded", "1"),
        (EngineStopped("stopping"), 503, "stopping", "1"),
        (RequestInvalid("the prompt is empty"), 400, "invalid_value", None),
    ],
)
def test_an_engine_that_takes_no_request(
    kit: Any, refusal: Exception, status: int, reason: str, retry: str | None, stream: bool
) -> None:
    kit.backend.refusal = refusal
    response = kit.caller().chat(stream=stream)
    assert str(refusal) in refused(response, status, reason)
    assert response.headers.get("retry-after") == retry
    kit.backend.refusal = None
    assert kit.caller().chat(stream=stream).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_fails_before_its_route_is_an_error_answer(kit: Any, stream: bool) -> None:
    kit.backend.script = lambda _request, sink, _cancel: sink(Failed("out of memory"))
    assert refused(kit.caller().chat(stream=stream), 500, "generation_failed") == "out of memory"
    kit.backend.script = kit.saying("fine")
    assert kit.caller().chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_the_node_cancels_is_unavailable(kit: Any, stream: bool) -> None:
    kit.backend.script = lambda _request, sink, _cancel: sink(Finished(FinishReason.CANCELLED, 0, 0.0, 0.0))
    refused(kit.caller().chat(stream=stream), 503, "cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_an_internal_failure_is_a_500_without_details(kit: Any, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    kit.backend.refusal = KeyError("secret prompt")
    caller = kit.caller()
    assert "secret" not in refused(caller.chat("secret prompt", stream=stream), 500, "internal_error")
    assert "request_failed error=KeyError" in caplog.text
    assert "secret" not in caplog.text
    kit.backend.refusal = None
    assert caller.chat().status_code == 200


def test_a_template_that_refuses_the_messages_is_the_clients_error(kit: Any) -> None:
    kit.backend.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refused(kit.caller().chat(), 400, "template_error", "messages")
    kit.backend.tokenizer.chat_template = "{# nothing #}"
    refused(kit.caller().chat(), 400, "template_error", "messages")


def test_logs_never_hold_text(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    kit.backend.script = kit.saying("xyzzy")
    kit.caller().chat("plugh")
    kit.caller().chat("plugh", stream=True)
    kit.caller().post(b'{"model": "plugh')
    assert "answered id=chatcmpl-" in caplog.text
    assert "route=remote" in caplog.text
    assert "plugh" not in caplog.text
    assert "xyzzy" not in caplog.text
