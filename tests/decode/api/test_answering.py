from __future__ import annotations

from typing import Any

import pytest

CUSTOM = [{"type": "web_search"}, {"type": "web_search"}, {"type": "image_generation", "output_format": "png"}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_tools_that_were_left_out_are_named_once_each(kit: Any, stream: bool) -> None:
    body = {"input": "Hi", "stream": stream}
    response = kit.caller().call("/v1/responses", **body, tools=CUSTOM)
    assert response.status_code == 200
    assert response.headers["x-muser-ignored-tools"] == "web_search, image_generation"
    assert response.headers["x-muser-route"] == "remote"
    assert "x-muser-ignored-tools" not in kit.caller().call("/v1/responses", **body).headers


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_whole_answer_is_what_the_stream_adds_up_to(kit: Any, path: str) -> None:
    kit.backend.script = kit.saying("One two three")
    body = (
        {"input": "Hi"}
        if path == "/v1/responses"
        else {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    )
    whole = kit.caller().call(path, **body).json()
    events = [data for _, data in kit.named_events(kit.caller().call(path, **body, stream=True))]
    if path == "/v1/responses":
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    else:
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert [{"type": "text", "text": text}] == whole["content"]
    assert whole["usage"] == (events[-1]["response"] if path == "/v1/responses" else events[-2])["usage"]
