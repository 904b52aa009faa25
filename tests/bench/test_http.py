from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from local_backend import LocalBackend, local_backend, served

from bench import http
from bench.driver import BenchError, Samples


@pytest.fixture(scope="module")
def backend(tiny_llama: Path) -> Iterator[LocalBackend]:
    with local_backend(tiny_llama) as backend:
        backend.aliases = frozenset({"muser"})
        yield backend


@pytest.fixture(scope="module")
def client(backend: LocalBackend) -> Iterator[http.Client]:
    with served(backend) as url:
        yield http.Client(int(url.rpartition(":")[2]))


def test_an_answer_is_timed_from_the_request_to_its_last_token(client: http.Client) -> None:
    first, second = client.ask("Once upon a time", 12), client.ask("Once upon a time", 12)
    assert first.text == second.text != ""
    assert first.first_s > 0
    assert first.rest_s > 0


def test_a_refusal_is_no_measurement(client: http.Client) -> None:
    with pytest.raises(BenchError, match="the node answers 400"):
        client.ask("a " * 5000, 2)


def test_a_node_that_stops_early_is_no_measurement(
    client: http.Client, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "context_tokens", 40)
    with pytest.raises(BenchError, match="tokens were answered, not 64"):
        client.ask("Once upon a time", 64)


def test_the_goals_compare_the_rounds_that_nobody_disturbed() -> None:
    samples = Samples({http.ENGINE: (1.0, 4.0, 4.0), http.CLIENT: (3.0, 1.25, 3.0)})
    goal = http.goal("a token", 1.25, samples)
    assert (goal.least, goal.measured, goal.met) == (0.8, 0.8, True)


@pytest.mark.slow
def test_the_engine_and_its_client_are_measured_over_the_same_answer(smollm2: Path) -> None:
    args = argparse.Namespace(model=smollm2, tokens=4, rounds=2, threads=1)
    with ExitStack() as stack:
        first, rest = http.measure(args, stack)
    for samples in (first, rest):
        assert isinstance(samples, Samples)
        assert set(samples.by_name) == {http.ENGINE, http.CLIENT}
        assert all(len(each) == 2 and min(each) > 0 for each in samples.by_name.values())
