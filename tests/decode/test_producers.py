"""Which producer a prompt goes to, by what their clients know of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from muser_decode.client import ProducerState, ProducerStatus
from muser_decode.engine.request import Route, RouteReport
from muser_decode.producers import Handoff, Producers
from muser_decode.router import Plan, RoutePolicy, Router
from muser_decode.standing import STEP_TOKENS, Standing
from muser_wire.geometry import ElementType, Geometry
from muser_wire.identities import Digest, Identities
from muser_wire.messages import Description

NOTHING = Digest(bytes(32))
GEOMETRY = Geometry(windows=(None, None), kv_heads=1, head_dim=8, element=ElementType.F16)
IDENTITIES = Identities(NOTHING, NOTHING, "kv1/f16", "native", NOTHING, 100, NOTHING)
PROMPT = list(range(5, 1001))


class Client:
    """What `Producers` needs of a `ProducerClient`; a chunk of 100 tokens takes `chunk_s`."""

    def __init__(self, name: str, *, chunk_s: float = 0.1, cache_nbytes: int = 0) -> None:
        self.name, self.standing = name, Standing()
        description = Description(
            IDENTITIES, b"{}", b"i" * 16, bytes(32), 1, 4096, (), 0, int(chunk_s * 1e9), cache_nbytes
        )
        self.status = ProducerStatus(ProducerState.READY, "", description, time.monotonic())
        self.started, self.stopped = threading.Event(), threading.Event()

    def down(self, reason: str) -> None:
        self.status = ProducerStatus(ProducerState.UNREACHABLE, reason)

    def start(self) -> None:
        self.started.set()

    def stop(self) -> None:
        self.stopped.set()


def over(clients: Sequence[Client], policy: RoutePolicy = RoutePolicy.REMOTE) -> Producers:
    return Producers(Router(policy), clients, GEOMETRY, 100)  # type: ignore[arg-type]


def chosen(choice: Handoff | Plan) -> str | None:
    return choice.plan.producer if isinstance(choice, Handoff) else None


def test_a_prompt_goes_to_the_producer_expected_first() -> None:
    assert chosen(over([Client("a"), Client("b", chunk_s=0.05)]).choose(PROMPT, 0)) == "b"


def test_one_that_was_tried_or_is_down_is_passed_over() -> None:
    a, b, c = Client("a", chunk_s=0.01), Client("b", chunk_s=0.02), Client("c")
    producers = over([a, b, c])
    assert chosen(producers.choose(PROMPT, 100, frozenset({"a"}))) == "b"
    b.down("gone")
    assert chosen(producers.choose(PROMPT, 100, frozenset({"a"}))) == "c"
    choice = producers.choose(PROMPT, 100, frozenset({"a", "c"}))
    assert isinstance(choice, Plan)
    assert (choice.producer, choice.reason) == (None, "producer b unreachable: gone")


def test_a_producer_that_failed_lately_comes_back() -> None:
    a, b = Client("a", chunk_s=0.01), Client("b")
    producers = over([a, b])
    a.standing.failed(time.monotonic())
    assert chosen(producers.choose(PROMPT, 0)) == "b"
    a.standing.completed(None, time.monotonic())
    assert chosen(producers.choose(PROMPT, 0)) == "a"


def test_a_prompt_follows_its_beginning_to_a_producer_that_keeps_prompts() -> None:
    forgets, keeps = Client("forgets"), Client("keeps", chunk_s=0.11, cache_nbytes=1)
    producers = over([forgets, keeps])
    assert chosen(producers.choose(PROMPT, 0)) == "forgets"
    for client in (forgets, keeps):
        client.standing.remember(PROMPT[: 3 * STEP_TOKENS])
    assert chosen(producers.choose(PROMPT, 0)) == "keeps"


def test_a_queue_of_this_node_s_own_counts_before_the_producer_tells_of_it() -> None:
    a, b = Client("a", chunk_s=0.1), Client("b", chunk_s=0.12)
    producers = over([a, b])
    key = a.standing.opened(1000, time.monotonic())
    assert chosen(producers.choose(PROMPT, 0)) == "b"
    a.standing.ended(key)
    assert chosen(producers.choose(PROMPT, 0)) == "a"


def test_without_producers_the_reason_is_that() -> None:
    choice = over([]).choose(PROMPT, 0)
    assert isinstance(choice, Plan)
    assert (choice.code, choice.reason) == ("no_producer", "no producer is configured")


def test_a_measured_handoff_is_compared_with_this_node() -> None:
    producers = over([Client("a")], RoutePolicy.AUTO)
    producers.learn(RouteReport(Route.LOCAL, "x", prefill_s=0.5, local_tokens=995), None)
    first = producers.choose(PROMPT, 0)
    assert isinstance(first, Handoff)
    producers.learn(RouteReport(Route.REMOTE, "", prefill_s=1.0, remote_tokens=995), first.plan)
    assert isinstance(producers.choose(PROMPT, 0), Plan)
    assert producers.rates() == {"local": 1990.0, "remote": 995.0}


def test_each_is_described_in_the_order_of_the_configuration() -> None:
    b, a = Client("b:1"), Client("a:1", chunk_s=0.2)
    a.standing.completed(5e8, time.monotonic())
    b.standing.failed(time.monotonic())
    described = over([b, a]).describe()
    assert [(each["name"], each["state"], each["tokens_per_s"], each["link_bytes_per_s"]) for each in described] == [
        ("b:1", "ready", 1000.0, None),
        ("a:1", "ready", 500.0, 500_000_000),
    ]
    assert described[0]["resting_s"] == pytest.approx(1.0, abs=0.11)
    a.down("gone")
    assert over([a]).describe()[0]["reason"] == "gone"


def test_every_client_is_started_and_stopped() -> None:
    clients = [Client("a"), Client("b")]
    producers = over(clients)
    producers.start()
    assert all(client.started.is_set() for client in clients)
    producers.stop()
    assert all(client.stopped.is_set() for client in clients)
