"""The decode node's metrics in Prometheus' text format. Nothing else of this node knows Prometheus.

What happens is counted as it is told; what is so at this moment is read when somebody asks. Labels come from
closed lists and from the configuration, never from a request or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from muser_decode.engine.request import Failed, Finished, FinishReason, Route, RouteReport
from muser_decode.observer import HandoffEnd
from muser_wire.footprint import peak_nbytes, resident_nbytes
from muser_wire.identities import Identities
from muser_wire.metrics import SECONDS, admitted, build_info

TOKENS_PER_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 500.0)

HELD_CODES = {
    "all held": "all_held",
    "differs at token": "differs",
    "nothing held goes beyond": "nothing_beyond",
    "no block continues": "no_block",
    "only": "too_short",
    "the block at token": "lost",
    "a block does not fit": "does_not_fit",
    "internal": "internal",
    "cancelled": "cancelled",
}
"""Stable words for where a held prefix ends, by how the reason begins."""

CACHE_COUNTS = {
    "memory_evicted": ("memory", "evicted"),
    "fetched_memory": ("memory", "read"),
    "fetched_disk": ("disk", "read"),
    "disk_saved": ("disk", "saved"),
    "disk_evicted": ("disk", "evicted"),
    "disk_invalid": ("disk", "invalid"),
    "disk_failed_writes": ("disk", "not_written"),
}
"""Counts of the store of blocks, by its own names: tier and what happened to a block."""


@dataclass(frozen=True)
class Now:
    """What can be asked at any moment. `cache` is None where nothing is kept."""

    active: Callable[[], int]
    waiting: Callable[[], int]
    producers: Callable[[], list[dict[str, object]]]
    cache: Callable[[], Mapping[str, object]] | None
    device_nbytes: Callable[[], int]


class Metrics:
    """See `muser_decode.observer.Observer`. Has a registry of its own."""

    def __init__(self, identities: Identities, model_id: str, kernels: tuple[str, ...] = ()) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Constant(build_info(identities, model_id)))
        registry.register(_Constant(admitted(kernels)))
        self._requests = Counter(
            "muser_requests", "Prompts whose cache is complete", ["route", "reason"], registry=registry
        )
        self._refused = Counter("muser_requests_refused", "Requests not taken", ["reason"], registry=registry)
        self._ended = Counter("muser_requests_ended", "Generations ended", ["route", "ending"], registry=registry)
        self._tokens = Counter("muser_prompt_tokens", "Prompt tokens by origin", ["origin"], registry=registry)
        self._generated = Counter("muser_generated_tokens", "Tokens generated", registry=registry)
        self._lookups = Counter(
            "muser_cache_prompts", "Prompts looked up in the cache", ["result", "reason"], registry=registry
        )
        self._first_token = _seconds("muser_time_to_first_token", "From request to first token", "route", registry)
        self._prefill = _seconds("muser_prefill", "From admission to a complete cache", "route", registry)
        self._rate = Histogram(
            "muser_decode_tokens_per_second", "Rate of a generation", buckets=TOKENS_PER_S, registry=registry
        )
        self._handoffs = Counter("muser_handoffs", "Handoffs ended", ["producer", "ending"], registry=registry)
        self._handoff_bytes = Counter("muser_handoff_bytes", "Verified bytes", ["producer"], registry=registry)
        self._handoff_seconds = _seconds("muser_handoff", "From asking to the last frame", "producer", registry)
        self._verified = Counter("muser_segments_verified", "Segments verified", ["producer"], registry=registry)
        self._segments_refused = Counter(
            "muser_segments_refused", "Frames refused", ["producer", "reason"], registry=registry
        )

    def watch(self, now: Now) -> None:
        """Read these, too, whenever the metrics are asked for."""
        self._registry.register(_Present(now))

    def exposition(self) -> bytes:
        """Return every metric in the text format."""
        return generate_latest(self._registry)

    def routed(self, report: RouteReport, code: str) -> None:
        """See `Observer`."""
        self._requests.labels(report.route.value, code).inc()
        self._prefill.labels(report.route.value).observe(report.prefill_s)
        for origin, tokens in report.tokens_by_origin.items():
            self._tokens.labels(origin).inc(tokens)
        if report.held_reason:
            result = "hit" if report.held_tokens else "miss"
            self._lookups.labels(result, held_code(report.held_reason)).inc()

    def refused(self, code: str) -> None:
        """See `Observer`."""
        self._refused.labels(code).inc()

    def ended(self, route: Route | None, last: Finished | Failed) -> None:
        """See `Observer`."""
        shown = route.value if route is not None else "none"
        ending = last.reason.value if isinstance(last, Finished) else "failed"
        self._ended.labels(shown, ending).inc()
        if not isinstance(last, Finished):
            return
        self._generated.inc(last.generated_tokens)
        if last.first_token_s > 0:
            self._first_token.labels(shown).observe(last.first_token_s)
        if last.reason is not FinishReason.CANCELLED and last.decode_s > 0 and last.generated_tokens:
            self._rate.observe(last.generated_tokens / last.decode_s)

    def handoff_ended(self, end: HandoffEnd) -> None:
        """See `Observer`."""
        self._handoffs.labels(end.producer, end.code).inc()
        self._handoff_bytes.labels(end.producer).inc(end.payload_nbytes)
        self._handoff_seconds.labels(end.producer).observe(end.seconds)
        self._verified.labels(end.producer).inc(end.segments_verified)
        if end.frame_refused:
            self._segments_refused.labels(end.producer, end.code).inc()


def held_code(reason: str) -> str:
    """Return a stable word for why a held prefix ends where it does.

    >>> held_code("differs at token 17"), held_code("something new")
    ('differs', 'other')
    """
    return next((code for start, code in HELD_CODES.items() if reason.startswith(start)), "other")


def _seconds(name: str, help_text: str, label: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{name}_seconds", help_text, [label], buckets=SECONDS, registry=registry)


class _Constant(Collector):
    """A metric that never changes."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class _Present(Collector):
    """What is so at this moment."""

    def __init__(self, now: Now) -> None:
        self._now = now

    def describe(self) -> list[Metric]:
        """Say nothing: to learn names, the registry would ask for values before there are any."""
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._now
        yield GaugeMetricFamily("muser_requests_active", "Requests that run", now.active())
        yield GaugeMetricFamily("muser_requests_waiting", "Requests that wait", now.waiting())
        yield from _producers(now.producers())
        if now.cache is not None:
            yield from _cache(now.cache())
        yield from memory(now.device_nbytes())


def _producers(described: list[dict[str, object]]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("muser_producer_ready", "1: handoffs are asked of it", labels=["producer"])
    resting = GaugeMetricFamily("muser_producer_resting_seconds", "It failed: left alone", labels=["producer"])
    wait = GaugeMetricFamily("muser_producer_wait_seconds", "Its queue, as it says", labels=["producer"])
    rate = GaugeMetricFamily("muser_producer_tokens_per_second", "Its prefill rate, as it says", labels=["producer"])
    link = GaugeMetricFamily("muser_producer_link_bytes_per_second", "Measured lately", labels=["producer"])
    for each in described:
        name = [str(each["name"])]
        ready.add_metric(name, float(each["state"] == "ready"))
        fields = (resting, "resting_s"), (wait, "wait_s"), (rate, "tokens_per_s"), (link, "link_bytes_per_s")
        for family, field in fields:
            value = each[field]
            if isinstance(value, int | float):
                family.add_metric(name, value)
    yield from (ready, resting, wait, rate, link)


def _cache(stats: Mapping[str, object]) -> Iterator[Metric]:
    size = GaugeMetricFamily("muser_cache_bytes", "Bytes of kept prompts", labels=["tier"])
    for tier, field in (("memory", "memory_nbytes"), ("disk", "disk_nbytes")):
        size.add_metric([tier], _number(stats, field))
    yield size
    yield GaugeMetricFamily("muser_cache_blocks", "Blocks of kept prompts", _number(stats, "blocks"))
    events = CounterMetricFamily("muser_cache_events", "What happened to blocks", labels=["tier", "event"])
    for field, labels in CACHE_COUNTS.items():
        events.add_metric(labels, _number(stats, field))
    yield events


def _number(stats: Mapping[str, object], field: str) -> float:
    value = stats.get(field, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def memory(device_nbytes: int) -> Iterator[Metric]:
    """Yield what memory this process has."""
    resident = resident_nbytes()
    if resident is not None:
        yield GaugeMetricFamily("muser_process_resident_bytes", "Resident memory", resident)
    yield GaugeMetricFamily("muser_process_peak_bytes", "Most memory ever resident", peak_nbytes())
    yield GaugeMetricFamily("muser_device_memory_bytes", "Memory of arrays", device_nbytes)
