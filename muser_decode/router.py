"""The router: predicts how long each way to a full cache takes, from measured rates, and takes the shorter.

Pure bookkeeping, without clock or thread: `now_s` is any monotonic time in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from muser_decode.client import ProducerState, ProducerStatus
from muser_decode.engine.request import Route, RouteReport

MIN_REMOTE_TOKENS = 32
"""Shorter prompts stay local: a handoff's round trips cost about as much as they would save."""

HANDOFF_OVERHEAD_S = 0.005
"""Fixed cost of a handoff, in seconds: two round trips, the begin frame and the seal."""

RATE_LIFETIME_S = 120.0
"""A rate not measured for so long is forgotten, so that the way is tried again: machines heat up, links come back."""

SMOOTHING = 0.4
"""Weight of the newest measurement in a running rate."""


class RoutePolicy(Enum):
    """Who decides. AUTO: the prediction. REMOTE: the producer whenever it is ready. LOCAL: never the producer."""

    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True)
class Plan:
    """Whether to open a handoff; if not, `reason` says why in a few words."""

    remote: bool
    reason: str = ""


@dataclass
class _Rate:
    tokens_per_s: float
    measured_s: float


class Router:
    """Chooses a way for each prompt and learns from what came of it."""

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy
        self._rates: dict[Route, _Rate] = {}

    def plan(self, prompt_tokens: int, producer: ProducerStatus | None, now_s: float) -> Plan:
        """Return the way for a prompt. A way with no fresh rate counts as worth a try, the producer's first."""
        if self._policy is RoutePolicy.LOCAL:
            return Plan(False, "configured to stay local")
        if producer is None:
            return Plan(False, "no producer is configured")
        if producer.state is not ProducerState.READY:
            return Plan(False, f"producer {producer.state.value}: {producer.reason}")
        if prompt_tokens < MIN_REMOTE_TOKENS:
            return Plan(False, f"the prompt is shorter than {MIN_REMOTE_TOKENS} tokens")
        if self._policy is RoutePolicy.REMOTE:
            return Plan(True)
        return self._predict(prompt_tokens, now_s)

    def learn(self, report: RouteReport, now_s: float) -> None:
        """Take in the measured rate of a prompt that came one way only; mixtures say little about either."""
        tokens = report.remote_tokens + report.local_tokens
        if report.route not in (Route.REMOTE, Route.LOCAL) or tokens < MIN_REMOTE_TOKENS or report.prefill_s <= 0:
            return
        measured = tokens / report.prefill_s
        rate = self._rates.get(report.route)
        if rate is not None and now_s - rate.measured_s < RATE_LIFETIME_S:
            measured = rate.tokens_per_s + SMOOTHING * (measured - rate.tokens_per_s)
        self._rates[report.route] = _Rate(measured, now_s)

    def rates(self) -> dict[str, float]:
        """Return the measured prompt tokens a second by route."""
        return {route.value: round(rate.tokens_per_s, 1) for route, rate in self._rates.items()}

    def _predict(self, tokens: int, now_s: float) -> Plan:
        remote, local = self._fresh(Route.REMOTE, now_s), self._fresh(Route.LOCAL, now_s)
        if remote is None or local is None:
            return Plan(True)
        remote_s, local_s = HANDOFF_OVERHEAD_S + tokens / remote, tokens / local
        if remote_s <= local_s:
            return Plan(True)
        return Plan(False, f"predicted {local_s:.3f} s here, {remote_s:.3f} s by the producer")

    def _fresh(self, route: Route, now_s: float) -> float | None:
        rate = self._rates.get(route)
        return rate.tokens_per_s if rate is not None and now_s - rate.measured_s < RATE_LIFETIME_S else None
