"""The router: predicts how long each way to a full cache takes, from measured rates, and takes the shortest.

Pure bookkeeping, without clock or thread: `now_s` is any monotonic time in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
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

MAX_ERROR = 16.0
"""What a producer takes may be this many times its prediction, or that part of it; more is an accident."""


class RoutePolicy(Enum):
    """Who decides. AUTO: the prediction. REMOTE: a producer whenever one is ready. LOCAL: never a producer."""

    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True)
class Work:
    """A prompt of `tokens` to be in the cache, `held_tokens` of which are; the others' planes have `nbytes`."""

    tokens: int
    held_tokens: int
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """A producer as the router weighs it.

    `queued_tokens`: of this node's handoffs that its status does not know yet. `queued_nbytes`: of this node's
    handoffs under way, which share the link. `seen_tokens`: leading tokens of the prompt that it has had before.
    `resting_s`: it failed lately and had better be left alone so long.
    """

    name: str
    status: ProducerStatus
    resting_s: float = 0.0
    queued_tokens: int = 0
    queued_nbytes: int = 0
    seen_tokens: int = 0
    link_nbytes_per_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """Which producer to ask. It is expected to be done in `predicted_s` seconds, of which `compute_s` are its queue
    and its work, beside `nbytes` on the link.

    None: this node computes; `reason` says why in a few words and `code` in a stable one.
    """

    producer: str | None
    code: str = ""
    reason: str = ""
    predicted_s: float = 0.0
    compute_s: float = 0.0
    nbytes: int = 0


@dataclass
class _Running:
    value: float
    measured_s: float


class Router:
    """Chooses a way for each prompt and learns from what came of it."""

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy
        self._rates: dict[Route, _Running] = {}
        self._errors: dict[str, _Running] = {}

    def plan(self, work: Work, candidates: Sequence[Candidate], now_s: float) -> Plan:
        """Return the way for a prompt. A way with no fresh measurement counts as worth a try, a producer's first."""
        if self._policy is RoutePolicy.LOCAL:
            return Plan(None, "configured_local", "configured to stay local")
        if not candidates:
            return Plan(None, "no_producer", "no producer is configured")
        ready = [candidate for candidate in candidates if candidate.status.state is ProducerState.READY]
        if not ready:
            return _none_ready(candidates)
        if work.tokens - work.held_tokens < MIN_REMOTE_TOKENS:
            return Plan(None, "short_prompt", f"the prompt is shorter than {MIN_REMOTE_TOKENS} tokens")
        usable = [candidate for candidate in ready if not candidate.resting_s]
        if not usable and self._policy is RoutePolicy.AUTO:
            return _all_resting(ready)
        plans = [self._predict(work, candidate, now_s) for candidate in usable or ready]
        best = min(plans, key=lambda plan: plan.predicted_s)
        return best if self._policy is RoutePolicy.REMOTE else self._compare(work, best, now_s)

    def learn(self, report: RouteReport, now_s: float) -> None:
        """Take in the measured rate of a prompt that came one way only; mixtures say little about either."""
        tokens = report.remote_tokens + report.local_tokens
        if report.route not in (Route.REMOTE, Route.LOCAL) or tokens < MIN_REMOTE_TOKENS or report.prefill_s <= 0:
            return
        self._rates[report.route] = _smoothed(self._rates.get(report.route), tokens / report.prefill_s, now_s)

    def learn_handoff(self, plan: Plan, took_s: float, link_nbytes_per_s: float | None, now_s: float) -> None:
        """Take in how long a whole handoff took, against what was expected of it by the link's rate as known now."""
        if plan.producer is not None and took_s > 0:
            error = took_s / _expected_s(plan.compute_s, plan.nbytes, link_nbytes_per_s)
            error = min(MAX_ERROR, max(1 / MAX_ERROR, error))
            self._errors[plan.producer] = _smoothed(self._errors.get(plan.producer), error, now_s)

    def rates(self) -> dict[str, float]:
        """Return the measured prompt tokens a second by route."""
        return {route.value: round(rate.value, 1) for route, rate in self._rates.items()}

    def _predict(self, work: Work, candidate: Candidate, now_s: float) -> Plan:
        """Return when a producer's last plane is expected here. What this node holds does not spare it any work."""
        status, description = candidate.status, candidate.status.description
        compute_s, nbytes = 0.0, work.nbytes + candidate.queued_nbytes
        if description is not None:
            token_s = description.predicted_chunk_ns / 1e9 / description.identities.chunk_tokens
            wait_s = max(0.0, description.predicted_wait_ns / 1e9 - (now_s - status.asked_s))
            missing_tokens = max(0, work.tokens - candidate.seen_tokens)
            compute_s = wait_s + (candidate.queued_tokens + missing_tokens) * token_s
        expected_s = _expected_s(compute_s, nbytes, candidate.link_nbytes_per_s)
        predicted_s = expected_s * self._error(candidate.name, now_s)
        return Plan(candidate.name, predicted_s=predicted_s, compute_s=compute_s, nbytes=nbytes)

    def _compare(self, work: Work, best: Plan, now_s: float) -> Plan:
        local = self._rates.get(Route.LOCAL)
        error = self._errors.get(str(best.producer))
        if not _fresh(local, now_s) or not _fresh(error, now_s) or local is None:
            return best
        local_s = (work.tokens - work.held_tokens) / local.value
        if best.predicted_s <= local_s:
            return best
        return Plan(
            None, "faster_here", f"predicted {local_s:.3f} s here, {best.predicted_s:.3f} s by producer {best.producer}"
        )

    def _error(self, producer: str, now_s: float) -> float:
        error = self._errors.get(producer)
        return error.value if error is not None and _fresh(error, now_s) else 1.0


def _expected_s(compute_s: float, nbytes: int, link_nbytes_per_s: float | None) -> float:
    """Return how long a handoff takes whose bytes leave while it is computed."""
    travel_s = nbytes / link_nbytes_per_s if link_nbytes_per_s else 0.0
    return HANDOFF_OVERHEAD_S + max(compute_s, travel_s)


def _none_ready(candidates: Sequence[Candidate]) -> Plan:
    reasons = [f"producer {c.name} {c.status.state.value}: {c.status.reason}" for c in candidates]
    return Plan(None, f"producer_{candidates[0].status.state.value}", "; ".join(reasons))


def _all_resting(ready: Sequence[Candidate]) -> Plan:
    reasons = [f"producer {c.name} failed lately and is left alone for {c.resting_s:.1f} s" for c in ready]
    return Plan(None, "producer_resting", "; ".join(reasons))


def _smoothed(before: _Running | None, measured: float, now_s: float) -> _Running:
    if before is not None and _fresh(before, now_s):
        measured = before.value + SMOOTHING * (measured - before.value)
    return _Running(measured, now_s)


def _fresh(running: _Running | None, now_s: float) -> bool:
    return running is not None and now_s - running.measured_s < RATE_LIFETIME_S
