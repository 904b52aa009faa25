"""What Claude Code and its like send to /v1/messages, as plain HTTP against a node."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
}
AGENT: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    "tools": [TOOL],
    "metadata": {"user_id": "u"},
    "temperature": 1,
}


@pytest.fixture(scope="module")
def client(node: Any) -> Any:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    with httpx.Client(base_url=node.url, headers=headers, timeout=60) as client:
        yield client


def test_a_call_and_its_result(client: httpx.Client) -> None:
    forced = {**AGENT, "tool_choice": {"type": "tool", "name": "look"}}
    answer = client.post("/v1/messages?beta=true", json=forced).json()
    (block,) = answer["content"]
    assert (answer["stop_reason"], block["type"], block["name"], set(block["input"])) == (
        "tool_use", "tool_use", "look", {"far"},
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "seen"}
    messages = [*AGENT["messages"], {"role": "assistant", "content": answer["content"]}]
    after = client.post(
        "/v1/messages", json={**AGENT, "max_tokens": 4, "messages": [*messages, {"role": "user", "content": [result]}]}
    )
    assert after.status_code == 200
    assert after.json()["stop_reason"] in ("max_tokens", "end_turn")


def test_a_stream_adds_up(client: httpx.Client) -> None:
    body = {**AGENT, "tool_choice": {"type": "any"}, "stream": True}
    with client.stream("POST", "/v1/messages", json=body) as response:
        events = [
            json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")
        ]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(json.loads("".join(event["delta"]["partial_json"] for event in events[2:-3]))) == {"far"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_counting(client: httpx.Client) -> None:
    body = {name: AGENT[name] for name in ("model", "system", "messages", "tools")}
    counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert counted == client.post("/v1/messages", json={**AGENT, "max_tokens": 1}).json()["usage"]["input_tokens"]
