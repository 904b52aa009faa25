from __future__ import annotations

import pytest

from muser_decode.client import ProducerState, ProducerStatus
from muser_decode.engine.request import Route, RouteReport
from muser_decode.router import MIN_REMOTE_TOKENS, RATE_LIFETIME_S, RoutePolicy, Router

READY = ProducerStatus(ProducerState.READY, "")


def measured(router: Router, route: Route, tokens_per_s: float, now_s: float) -> None:
    remote, local = (1000, 0) if route is Route.REMOTE else (0, 1000)
    router.learn(RouteReport(route, "", prefill_s=1000 / tokens_per_s, remote_tokens=remote, local_tokens=local), now_s)


def test_an_unmeasured_producer_is_tried_first() -> None:
    assert Router(RoutePolicy.AUTO).plan(1000, READY, 0.0).remote


def test_the_way_that_is_predicted_faster_is_taken() -> None:
    router = Router(RoutePolicy.AUTO)
    measured(router, Route.REMOTE, 800.0, 0.0)
    measured(router, Route.LOCAL, 200.0, 0.0)
    assert router.plan(1000, READY, 1.0).remote
    router = Router(RoutePolicy.AUTO)
    measured(router, Route.REMOTE, 200.0, 0.0)
    measured(router, Route.LOCAL, 800.0, 0.0)
    plan = router.plan(1000, READY, 1.0)
    assert not plan.remote
    assert plan.reason == "predicted 1.250 s here, 5.005 s by the producer"


def test_a_prediction_expires_so_that_the_producer_is_tried_again() -> None:
    router = Router(RoutePolicy.AUTO)
    measured(router, Route.REMOTE, 200.0, 0.0)
    measured(router, Route.LOCAL, 800.0, 100.0)
    assert not router.plan(1000, READY, RATE_LIFETIME_S - 1).remote
    assert router.plan(1000, READY, RATE_LIFETIME_S).remote


def test_the_running_rate_follows_new_measurements() -> None:
    router = Router(RoutePolicy.AUTO)
    measured(router, Route.REMOTE, 100.0, 0.0)
    measured(router, Route.REMOTE, 200.0, 1.0)
    assert router.rates() == {"remote": 140.0}
    measured(router, Route.REMOTE, 50.0, 1000.0)
    assert router.rates() == {"remote": 50.0}


def test_salvaged_and_short_prompts_teach_nothing() -> None:
    router = Router(RoutePolicy.AUTO)
    router.learn(RouteReport(Route.SALVAGED, "", 1.0, remote_tokens=500, local_tokens=500), 0.0)
    router.learn(RouteReport(Route.LOCAL, "", 1.0, local_tokens=MIN_REMOTE_TOKENS - 1), 0.0)
    router.learn(RouteReport(Route.LOCAL, "", 0.0, local_tokens=500), 0.0)
    assert router.rates() == {}


@pytest.mark.parametrize(
    ("policy", "tokens", "status", "reason"),
    [
        (RoutePolicy.LOCAL, 1000, READY, "configured to stay local"),
        (RoutePolicy.AUTO, 1000, None, "no producer is configured"),
        (RoutePolicy.REMOTE, 31, READY, "the prompt is shorter than 32 tokens"),
        (
            RoutePolicy.REMOTE,
            1000,
            ProducerStatus(ProducerState.REFUSED, "lane differs: a here, b at the peer"),
            "producer refused: lane differs: a here, b at the peer",
        ),
        (RoutePolicy.AUTO, 1000, ProducerStatus(ProducerState.UNREACHABLE, "gone"), "producer unreachable: gone"),
    ],
)
def test_staying_local_has_a_reason(
    policy: RoutePolicy, tokens: int, status: ProducerStatus | None, reason: str
) -> None:
    plan = Router(policy).plan(tokens, status, 0.0)
    assert (plan.remote, plan.reason) == (False, reason)


def test_remote_policy_does_not_predict() -> None:
    router = Router(RoutePolicy.REMOTE)
    measured(router, Route.REMOTE, 1.0, 0.0)
    measured(router, Route.LOCAL, 1000.0, 0.0)
    assert router.plan(32, READY, 0.0).remote
