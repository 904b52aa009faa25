"""The same body and seed give the same answer: twice, streamed, alone and among four others, in every family."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from local_backend import LocalBackend, local_backend, served

from muser_wire.model.tiny import write_tiny

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}, "at": {"enum": ["sea", "sky"]}},
    "required": ["far", "at"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "k", "schema": SCHEMA}}


def body(text: str, tokens: int = 24, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


BODIES = [
    body("Where is it?", temperature=0, logprobs=True, top_logprobs=3),
    body("one two three " * 30, temperature=0.9, seed=7),
    body("Say something long.", temperature=1.1, top_p=0.8, seed=8, frequency_penalty=0.6, n=2),
    body("x", temperature=0.7, top_k=30, min_p=0.01, seed=9, logprobs=True, stop=["e"]),
    body("Answer in JSON.", temperature=0.8, seed=10, tokens=60, response_format=FORMAT),
]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LocalBackend, httpx.Client]]:
    path = tmp_path_factory.mktemp("models") / request.param
    write_tiny(request.param, path)
    with (
        local_backend(path, max_queue=64) as backend,
        served(backend) as url,
        httpx.Client(base_url=url, timeout=100) as client,
    ):
        yield backend, client


def whole(client: httpx.Client, asked: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Each choice's text, likelihoods and end."""
    response = client.post(PATH, json=asked)
    assert response.status_code == 200
    return [(one["message"]["content"], one["logprobs"], one["finish_reason"]) for one in response.json()["choices"]]


def streamed(client: httpx.Client, asked: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """The same, put together from a stream."""
    choices: dict[int, tuple[list[str], list[Any], list[str]]] = {}
    with client.stream("POST", PATH, json={**asked, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for one in json.loads(line.removeprefix("data: "))["choices"]:
                texts, likelihoods, ends = choices.setdefault(one["index"], ([], [], []))
                texts.append(one["delta"].get("content") or "")
                likelihoods += (one["logprobs"] or {}).get("content") or []
                ends += [one["finish_reason"]] if one["finish_reason"] else []
    return [
        ("".join(texts), {"content": likelihoods, "refusal": None} if likelihoods else None, *ends)
        for _, (texts, likelihoods, ends) in sorted(choices.items())
    ]


def test_alone_twice_streamed_and_among_four_others(node: Any) -> None:
    _, client = node
    alone = [whole(client, asked) for asked in BODIES]
    assert len({choice[0] for choices in alone for choice in choices}) > 4
    assert [whole(client, asked) for asked in BODIES] == alone
    assert [streamed(client, asked) for asked in BODIES] == alone
    for turn in range(3):
        together = threading.Barrier(len(BODIES))

        def ask(index: int, turn: int = turn, together: threading.Barrier = together) -> Any:
            together.wait(30)
            return (whole if (index + turn) % 2 else streamed)(client, BODIES[index])

        with ThreadPoolExecutor(len(BODIES)) as pool:
            assert list(pool.map(ask, range(len(BODIES)))) == alone
    for choice in alone[4]:
        assert set(json.loads(choice[0])) == {"far", "at"}
