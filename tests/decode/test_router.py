from __future__ import annotations

import dataclasses

import pytest

from muser_decode.client import ProducerState, ProducerStatus
from muser_decode.engine.request import Route, RouteReport
from muser_decode.router import MIN_REMOTE_TOKENS, RATE_LIFETIME_S, Candidate, Plan, RoutePolicy, Router, Work
from muser_wire.identities import Digest, Identities
from muser_wire.messages import Description

NOTHING = Digest(bytes(32))
IDENTITIES = Identities(NOTHING, NOTHING, "kv1/f16", "native", NOTHING, 100, NOTHING)
"""A grid of 100 tokens."""


def producer(name: str = "p", *, tokens_per_s: float = 1000.0, wait_s: float = 0.0, **facts: object) -> Candidate:
    """A ready producer, asked at time 0."""
    chunk_ns = int(100 / tokens_per_s * 1e9)
    description = Description(
        IDENTITIES,
        b"{}",
        bytes(16),
        bytes(32),
        1,
        4096,
        (),
        predicted_wait_ns=int(wait_s * 1e9),
        predicted_chunk_ns=chunk_ns,
    )
    return Candidate(name, ProducerStatus(ProducerState.READY, "", description, 0.0), **facts)  # type: ignore[arg-type]


def down(name: str, state: ProducerState, reason: str) -> Candidate:
    return Candidate(name, ProducerStatus(state, reason))


def work(tokens: int = 1000, held: int = 0, nbytes: int = 0) -> Work:
    return Work(tokens, held, nbytes)


def measured_here(router: Router, tokens_per_s: float, now_s: float = 0.0) -> None:
    router.learn(RouteReport(Route.LOCAL, "", prefill_s=1000 / tokens_per_s, local_tokens=1000), now_s)


def tried(router: Router, name: str = "p", now_s: float = 0.0, error: float = 1.0) -> None:
    """A whole handoff that was expected to take 1 s and took `error` times as long."""
    router.learn_handoff(Plan(name, compute_s=1.0 - 0.005), error, None, now_s)


def test_an_unmeasured_producer_is_tried_first() -> None:
    router = Router(RoutePolicy.AUTO)
    measured_here(router, 5000.0)
    assert router.plan(work(), [producer(tokens_per_s=10.0)], 0.0).producer == "p"


def test_the_way_that_is_predicted_faster_is_taken() -> None:
    router = Router(RoutePolicy.AUTO)
    tried(router)
    measured_here(router, 200.0)
    plan = router.plan(work(), [producer(tokens_per_s=800.0)], 1.0)
    assert (plan.producer, plan.predicted_s) == ("p", pytest.approx(1000 / 800 + 0.005))
    router = Router(RoutePolicy.AUTO)
    tried(router)
    measured_here(router, 800.0)
    plan = router.plan(work(), [producer(tokens_per_s=200.0)], 1.0)
    assert plan.producer is None
    assert (plan.code, plan.reason) == ("faster_here", "predicted 1.250 s here, 5.005 s by producer p")


def test_of_several_producers_the_one_expected_first_is_taken() -> None:
    router = Router(RoutePolicy.REMOTE)
    slow, fast = producer("slow", tokens_per_s=500.0), producer("fast", tokens_per_s=2000.0)
    assert router.plan(work(), [slow, fast], 0.0).producer == "fast"
    # 1,000 tokens: 0.5 s of work behind 2 s of queue, against 2 s of work.
    busy = producer("fast", tokens_per_s=2000.0, wait_s=2.0)
    assert router.plan(work(), [slow, busy], 0.0).producer == "slow"
    # What was to be waited for when it was asked has passed meanwhile.
    assert router.plan(work(), [slow, busy], 1.0).producer == "fast"
    # This node's own handoffs since then count as well: 4,000 tokens at 2,000 a second.
    queued = producer("fast", tokens_per_s=2000.0, queued_tokens=4000)
    assert router.plan(work(), [slow, queued], 0.0).producer == "slow"


def test_equal_producers_are_taken_in_the_order_of_the_configuration() -> None:
    router = Router(RoutePolicy.REMOTE)
    assert router.plan(work(), [producer("b"), producer("a")], 0.0).producer == "b"


def test_a_producer_that_has_had_the_prompt_is_preferred() -> None:
    router = Router(RoutePolicy.REMOTE)
    fresh, knows = producer("fresh", tokens_per_s=1500.0), producer("knows", seen_tokens=896)
    assert router.plan(work(), [fresh, knows], 0.0).producer == "knows"


def test_what_this_node_holds_does_not_spare_a_producer_its_work() -> None:
    router = Router(RoutePolicy.AUTO)
    tried(router)
    measured_here(router, 500.0)
    # 1,000 tokens there take 1 s; the 100 that are missing take 0.2 s here.
    assert router.plan(work(held=0), [producer()], 0.0).producer == "p"
    assert router.plan(work(held=900), [producer()], 0.0).producer is None
    assert router.plan(work(held=900), [producer(seen_tokens=900)], 0.0).producer == "p"


def test_a_slow_link_counts_when_it_takes_longer_than_the_work() -> None:
    router = Router(RoutePolicy.REMOTE)
    far = producer("far", tokens_per_s=4000.0, link_nbytes_per_s=1e6)
    near = producer("near", tokens_per_s=1000.0, link_nbytes_per_s=1e9)
    assert router.plan(work(nbytes=2_000_000), [far, near], 0.0).producer == "near"
    assert router.plan(work(nbytes=500_000), [far, near], 0.0).producer == "far"
    # Other handoffs of this node are on that link too.
    assert (
        router.plan(work(nbytes=500_000), [dataclasses.replace(far, queued_nbytes=600_000), near], 0.0).producer
        == "near"
    )


def test_a_producer_that_takes_longer_than_it_says_is_believed_less() -> None:
    router = Router(RoutePolicy.AUTO)
    measured_here(router, 500.0)
    tried(router, error=4.0)
    plan = router.plan(work(), [producer()], 1.0)
    assert plan.reason == "predicted 2.000 s here, 4.020 s by producer p"
    assert router.plan(work(), [producer(), producer("other", tokens_per_s=900.0)], 2.0).producer == "other"


def test_a_prediction_expires_so_that_the_producer_is_tried_again() -> None:
    router = Router(RoutePolicy.AUTO)
    tried(router)
    measured_here(router, 800.0, 100.0)
    slow = [producer(tokens_per_s=200.0)]
    assert router.plan(work(), slow, RATE_LIFETIME_S - 1).producer is None
    assert router.plan(work(), slow, RATE_LIFETIME_S).producer == "p"


def test_the_running_rate_follows_new_measurements() -> None:
    router = Router(RoutePolicy.AUTO)
    measured_here(router, 100.0, 0.0)
    measured_here(router, 200.0, 1.0)
    assert router.rates() == {"local": 140.0}
    measured_here(router, 50.0, 1000.0)
    assert router.rates() == {"local": 50.0}


def test_salvaged_and_short_prompts_teach_nothing() -> None:
    router = Router(RoutePolicy.AUTO)
    router.learn(RouteReport(Route.SALVAGED, "", 1.0, remote_tokens=500, local_tokens=500), 0.0)
    router.learn(RouteReport(Route.LOCAL, "", 1.0, local_tokens=MIN_REMOTE_TOKENS - 1), 0.0)
    router.learn(RouteReport(Route.LOCAL, "", 0.0, local_tokens=500), 0.0)
    assert router.rates() == {}


REFUSED = down("b:4950", ProducerState.REFUSED, "lane differs: a here, b at the peer")
GONE = down("a:4950", ProducerState.UNREACHABLE, "gone")


@pytest.mark.parametrize(
    ("policy", "tokens", "candidates", "code", "reason"),
    [
        (RoutePolicy.LOCAL, 1000, [producer()], "configured_local", "configured to stay local"),
        (RoutePolicy.AUTO, 1000, [], "no_producer", "no producer is configured"),
        (RoutePolicy.REMOTE, 31, [producer()], "short_prompt", "the prompt is shorter than 32 tokens"),
        (
            RoutePolicy.REMOTE,
            1000,
            [REFUSED],
            "producer_refused",
            "producer b:4950 refused: lane differs: a here, b at the peer",
        ),
        (
            RoutePolicy.AUTO,
            1000,
            [GONE, REFUSED],
            "producer_unreachable",
            "producer a:4950 unreachable: gone; producer b:4950 refused: lane differs: a here, b at the peer",
        ),
    ],
)
def test_staying_local_has_a_reason(
    policy: RoutePolicy, tokens: int, candidates: list[Candidate], code: str, reason: str
) -> None:
    plan = Router(policy).plan(work(tokens), candidates, 0.0)
    assert (plan.producer, plan.code, plan.reason) == (None, code, reason)


def test_one_producer_s_difference_excludes_that_one_only() -> None:
    assert Router(RoutePolicy.REMOTE).plan(work(), [REFUSED, GONE, producer("c")], 0.0).producer == "c"


def test_a_producer_that_failed_lately_is_left_alone_while_another_works() -> None:
    resting = producer("resting", tokens_per_s=1e6, resting_s=3.0)
    for policy in (RoutePolicy.AUTO, RoutePolicy.REMOTE):
        assert Router(policy).plan(work(), [resting, producer("p")], 0.0).producer == "p"
    plan = Router(RoutePolicy.AUTO).plan(work(), [resting], 0.0)
    assert (plan.code, plan.reason) == (
        "producer_resting",
        "producer resting failed lately and is left alone for 3.0 s",
    )
    # "Whenever one is ready" means this one too, when there is no other.
    assert Router(RoutePolicy.REMOTE).plan(work(), [resting], 0.0).producer == "resting"
    rested = dataclasses.replace(resting, resting_s=0.0)
    assert Router(RoutePolicy.AUTO).plan(work(), [rested], 0.0).producer == "resting"


def test_remote_policy_does_not_predict() -> None:
    router = Router(RoutePolicy.REMOTE)
    tried(router)
    measured_here(router, 1e6)
    assert router.plan(work(32), [producer(tokens_per_s=1.0)], 0.0).producer == "p"


def test_a_slow_link_is_not_counted_a_second_time_once_it_is_known() -> None:
    router = Router(RoutePolicy.AUTO)
    measured_here(router, 100.0)
    first = router.plan(work(nbytes=4_000_000), [producer()], 0.0)
    # Nothing was known of the link; its 4 s are explained by the rate that the handoff itself has shown.
    router.learn_handoff(first, 4.005, 1e6, 0.0)
    plan = router.plan(work(nbytes=4_000_000), [producer(link_nbytes_per_s=1e6)], 1.0)
    assert plan.predicted_s == pytest.approx(4.005)
