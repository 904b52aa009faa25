"""Eight clients at once, some of which go away or send nonsense: the others get what they would get alone."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

CLIENTS, REQUESTS = 8, 200
GONE, MALFORMED = 0.10, 0.05
GROWTH_NBYTES = 64 * 1024 * 1024
"""What the second half of the load may add to what the first half left: arenas of the allocator, no request's data."""

PROMPTS = ("Where is it?", "one two three " * 12, "Say something long.", "x")


STATM = Path("/proc/self/statm")


def resident_nbytes() -> int:
    """Memory of this process, which is the node's and the clients'; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def body(number: int, *, stream: bool) -> dict[str, Any]:
    message = {"role": "user", "content": PROMPTS[number % len(PROMPTS)]}
    return {
        "model": "tiny",
        "messages": [message],
        "temperature": 0.8,
        "seed": number % 3,
        "max_tokens": 10,
        "stream": stream,
    }


def test_others_that_go_away_or_send_nonsense_change_no_answer(node: Any) -> None:
    client = httpx.Client(base_url=node.url, timeout=60, limits=httpx.Limits(max_connections=CLIENTS))
    path = "/v1/chat/completions"
    alone = {
        (number % len(PROMPTS), number % 3): client.post(path, json=body(number, stream=False)).json()
        for number in range(len(PROMPTS) * 3)
    }
    done, sizes, lock = [0], [0], threading.Lock()

    def one(number: int) -> None:
        dice = random.Random(number)
        chance = dice.random()
        if chance < GONE:
            with client.stream("POST", path, json={**body(number, stream=True), "max_tokens": 400}) as response:
                # The first line comes while the prompt waits or is prefilled, later ones with tokens.
                for _ in islice(response.iter_lines(), dice.choice((0, 1, 3, 9, 21))):
                    pass
        elif chance < GONE + MALFORMED:
            assert client.post(path, json={**body(number, stream=False), "messages": [number]}).status_code == 400
        else:
            answer = client.post(path, json=body(number, stream=False))
            assert answer.status_code == 200
            expected = alone[number % len(PROMPTS), number % 3]
            assert answer.json()["choices"] == expected["choices"]
            assert answer.json()["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        with lock:
            done[0] += 1
            if done[0] == REQUESTS // 2:
                sizes[0] = resident_nbytes()

    with contextlib.closing(client), ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(REQUESTS)))
        assert done[0] == REQUESTS
        end = time.monotonic() + 30
        while node.backend.engine.load and time.monotonic() < end:
            time.sleep(0.02)
        assert node.backend.engine.load == 0
        assert resident_nbytes() - sizes[0] < GROWTH_NBYTES
        assert client.get("/ready").status_code == 200
