"""The producers of this node: which one a prompt goes to, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from muser_decode.client import ProducerClient
from muser_decode.engine.request import Route, RouteReport
from muser_decode.ingest import RemoteSource
from muser_decode.observer import Observer, Unobserved
from muser_decode.router import Candidate, Plan, Router, Work
from muser_decode.standing import prompt_steps
from muser_wire.geometry import Geometry

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Handoff:
    """A handoff that may begin: the source of it, and the plan that chose its producer."""

    source: RemoteSource
    plan: Plan


class Producers:
    """Every method is thread-safe and quick. Without clients every prompt is computed here."""

    def __init__(
        self,
        router: Router,
        clients: Sequence[ProducerClient],
        geometry: Geometry,
        chunk_tokens: int,
        observer: Observer | None = None,
    ) -> None:
        self._router = router
        self._clients = {client.name: client for client in clients}
        self._travelling_nbytes = partial(travelling_nbytes, geometry, chunk_tokens)
        self._observer = observer or Unobserved()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._clients)

    def choose(self, prompt_ids: Sequence[int], held_tokens: int, tried: frozenset[str] = NOBODY) -> Handoff | Plan:
        """Return a handoff with a producer that was not `tried`, or why this node computes what is not held."""
        now_s, ids = time.monotonic(), prompt_ids[:-1]
        work = Work(len(ids), held_tokens, self._travelling_nbytes(len(ids) - held_tokens))
        clients = [client for name, client in self._clients.items() if name not in tried]
        steps = prompt_steps(ids) if any(map(_keeps, clients)) else []
        candidates = [self._candidate(client, steps, now_s) for client in clients]
        with self._lock:
            plan = self._router.plan(work, candidates, now_s)
        if plan.producer is None:
            return plan
        client = self._clients[plan.producer]
        return Handoff(RemoteSource(client, prompt_ids, held_tokens, self._observer), plan)

    def _candidate(self, client: ProducerClient, steps: Sequence[bytes], now_s: float) -> Candidate:
        status, standing = client.status, client.standing
        return Candidate(
            name=client.name,
            status=status,
            resting_s=standing.resting_s(now_s),
            queued_tokens=standing.tokens_since(status.asked_s),
            queued_nbytes=self._travelling_nbytes(standing.tokens_since(0.0)),
            seen_tokens=standing.seen_tokens(steps) if _keeps(client) else 0,
            link_nbytes_per_s=standing.link_nbytes_per_s(now_s),
        )

    def learn(self, report: RouteReport, plan: Plan | None) -> None:
        """Take in how a prompt's cache came to be; `plan` is that of its only handoff, if there was one."""
        now_s = time.monotonic()
        with self._lock:
            self._router.learn(report, now_s)
            if plan is not None and plan.producer is not None and report.route is Route.REMOTE:
                link = self._clients[plan.producer].standing.link_nbytes_per_s(now_s)
                self._router.learn_handoff(plan, report.prefill_s, link, now_s)

    def rates(self) -> dict[str, float]:
        """Return the measured prompt tokens a second by route."""
        with self._lock:
            return self._router.rates()

    def describe(self) -> list[dict[str, object]]:
        """Return what is known of each producer, as JSON values, in the order of the configuration."""
        now_s = time.monotonic()
        return [_described(client, now_s) for client in self._clients.values()]

    def start(self) -> None:
        """Ask every producer once, all at the same time, then watch them."""
        asking = [threading.Thread(target=client.start, daemon=True) for client in self._clients.values()]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()

    def stop(self) -> None:
        """End the watches and the connections."""
        for client in self._clients.values():
            client.stop()


def _keeps(client: ProducerClient) -> bool:
    """Whether a producer, as far as is known, keeps prompts that it computed."""
    description = client.status.description
    return description is not None and description.cache_nbytes > 0


def _described(client: ProducerClient, now_s: float) -> dict[str, object]:
    status, description = client.status, client.status.description
    rate = client.standing.link_nbytes_per_s(now_s)
    return {
        "name": client.name,
        "state": status.state.value,
        "reason": status.reason,
        "resting_s": round(client.standing.resting_s(now_s), 1),
        "wait_s": description.predicted_wait_ns / 1e9 if description else None,
        "tokens_per_s": round(description.identities.chunk_tokens * 1e9 / description.predicted_chunk_ns, 1)
        if description
        else None,
        "link_bytes_per_s": round(rate) if rate is not None else None,
    }


def travelling_nbytes(geometry: Geometry, chunk_tokens: int, tokens: int) -> int:
    """Return about how many bytes the planes of `tokens` positions have on the wire; sliding layers send less [4.4].

    >>> from muser_wire.geometry import ElementType
    >>> geometry = Geometry(windows=(None, 512), kv_heads=1, head_dim=64, element=ElementType.F16)
    >>> travelling_nbytes(geometry, 2048, 4096) == 256 * (4096 + 1024)
    True
    """
    layers = sum(1.0 if window is None else min(1.0, window / chunk_tokens) for window in geometry.windows)
    return int(geometry.layer_token_nbytes * layers * tokens)
