"""Ids are made here: what a client calls its requests changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

PROMPTS = ("one", "two")


def _ask(url: str, prompt: str, **named: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0}
    headers = {"x-request-id": named["id"], "idempotency-key": named["id"]} if named else {}
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **named}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_two_requests_that_carry_the_same_client_id_do_not_meet(node: Any) -> None:
    alone = [_ask(node.url, prompt)["choices"][0]["message"]["content"] for prompt in PROMPTS]
    assert alone[0] != alone[1]
    same = {"id": "chatcmpl-same", "request_id": "same", "user": "same"}
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda prompt: _ask(node.url, prompt, **same), PROMPTS * 3))
    assert [one["choices"][0]["message"]["content"] for one in told] == alone * 3
    ids = {one["id"] for one in told}
    assert len(ids) == len(told)
    assert "chatcmpl-same" not in ids
