"""Real weights through two processes: the greedy text is that of the reference implementation.

The expected texts come from transformers 5.24 in float32 with the same weights. The two best logits are never
nearer than 0.018 along them, far more than rounding keys and values to f16 moves.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import Pair, PairOptions
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path

START_S = 110.0
ANSWER_S = 90.0
PROMPT = (
    "The reader works through the text and the writer gives the answer, word by word. "
    "When the cable is pulled out, the writer keeps every parcel that was complete and reads the rest by itself. "
    "Nothing is lost but time, and the answer is the same. In the morning the two machines"
)
EXPECTED = {
    "smollm2": (
        58,
        (
            " are working, and the answer is the same. In the evening the two machines are working, and the answer is"
            " the same. In the morning the two machines"
        ),
    ),
    "gemma3-270m": (
        59,
        (
            " are working, and the writer is reading the answer to the cable. The answer is the same. The reader works"
            " through the text and the writer gives the answer"
        ),
    ),
}


@pytest.fixture(params=EXPECTED)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Pair]]:
    """Both nodes on a fetched model, in float32, on a grid of 32 tokens so that a prompt is two chunks."""
    model = fetched_path(request.param, muser_home())
    if not model.is_file():
        pytest.fail(f"{model} is missing: run `make test`, or `muser model fetch {request.param}` once", pytrace=False)
    pair = SmallGrid(
        PairOptions(model, tmp_path, start_timeout_s=START_S, route="remote", threads=1, cache_memory_mb=0), piped=False
    )
    try:
        pair.start(lambda node: None)
        yield request.param, pair
    finally:
        pair.stop()


class SmallGrid(Pair):
    """A pair on a grid of 32 tokens."""

    def _prefill_command(self) -> list[str]:
        return [*super()._prefill_command(), "--chunk-tokens", "32"]

    def _decode_command(self) -> list[str]:
        return [*super()._decode_command(), "--chunk-tokens", "32"]


def complete(port: int) -> tuple[str, dict[str, Any]]:
    """Return (route, answer) of a greedy completion of the prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    body = {"model": "muser", "prompt": PROMPT, "temperature": 0, "max_tokens": 32, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return str(response.getheader("x-muser-route")), answer


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_text_is_that_of_the_reference_by_either_way(served: tuple[str, Pair]) -> None:
    name, pair = served
    prompt_tokens, text = EXPECTED[name]
    port = pair.decode.ports["port"]
    route, remote = complete(port)
    assert route == "remote"
    assert remote["usage"]["prompt_tokens"] == prompt_tokens
    assert remote["choices"][0]["text"] == text
    pair.prefill.kill()
    route, local = complete(port)
    assert route == "local"
    assert local["choices"][0]["text"] == text
