"""Coding agents' own requests against a node of each family: answered, streamed, and what is not there is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_requests import CLAUDE_CODE, CODEX
from local_backend import local_backend, served

from muser_decode.formats.muse import Muse
from muser_wire.model.tiny import write_tiny

CONTEXT_TOKENS = 16384
"""An agent's definitions of its tools are long in a vocabulary of single letters."""


@pytest.fixture(scope="module", params=["llama", "muse_glimmer"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    write_tiny(request.param, path, max_positions=CONTEXT_TOKENS)
    options = {"chat_template": Muse().template} if request.param == "muse_glimmer" else {}
    with local_backend(path) as backend, served(backend, **options) as url:
        headers = {"authorization": "Bearer none", "x-api-key": "none", "anthropic-version": "2023-06-01"}
        with httpx.Client(base_url=url, headers=headers, timeout=100) as client:
            yield client


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def codex(**more: Any) -> dict[str, Any]:
    body = {**copy.deepcopy(CODEX), **more}
    # Muse Glimmer cannot be kept from reasoning.
    return body | {"reasoning": None}


def test_codex_is_answered(client: httpx.Client) -> None:
    response = client.post("/v1/responses", json=codex())
    assert response.status_code == 200, response.text
    assert response.headers["x-muser-ignored-tools"] == "web_search, image_generation"
    told = events(response.text)
    assert [told[0]["type"], told[-1]["type"]] in (
        ["response.created", "response.incomplete"],
        ["response.created", "response.completed"],
    )
    # The answer says which tools the model was told of.
    assert [tool["type"] for tool in told[-1]["response"]["tools"]] == ["function"] * 3 + ["custom"]
    assert told[-1]["response"]["usage"]["input_tokens"] > 1000


def test_claude_code_is_answered(client: httpx.Client) -> None:
    response = client.post("/v1/messages?beta=true", json=CLAUDE_CODE)
    assert response.status_code == 200, response.text
    assert response.headers["x-muser-ignored-tools"] == "web_search_20250305"
    told = events(response.text)
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "message_stop")
    counted = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools", "thinking")}
    count = client.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"]
    assert count == told[0]["message"]["usage"]["input_tokens"] > 1000


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/responses", {"store": True}, "store"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ("/v1/responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("/v1/messages", {"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124"),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        ("/v1/messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_demanded_and_not_there_is_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    whole = codex(**body) if path == "/v1/responses" else {**CLAUDE_CODE, **body}
    response = client.post(path, json=whole)
    assert response.status_code == 400
    error = response.json()["error"]
    assert named in (error.get("param") or error["message"])
