"""The producer's metrics in Prometheus' text format, and the port that gives them out. Nothing else of this node
knows Prometheus.

What happens is counted as it is told; what is so at this moment is read when somebody asks. Labels come from closed
lists, never from a request or a peer.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from muser_prefill.observer import Computed, Sent
from muser_wire.footprint import peak_nbytes, resident_nbytes
from muser_wire.identities import Identities
from muser_wire.metrics import SECONDS, admitted, build_info
from muser_wire.transport.ports import port_taken

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
IDLE_S = 10.0
"""How long, in seconds, a connection may take to ask."""

TOKENS_PER_S = (10.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0)


@dataclass(frozen=True)
class Now:
    """What can be asked at any moment. `cache` is None where nothing is kept."""

    unfinished: Callable[[], int]
    wait_s: Callable[[], float]
    seconds_per_chunk: Callable[[], float]
    cache: Callable[[], Mapping[str, object]] | None
    device_nbytes: Callable[[], int]


class Metrics:
    """See `muser_prefill.observer.Observer`. Has a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._accepted = Counter("muser_handoffs_accepted", "Handoffs accepted", registry=registry)
        self._refused = Counter("muser_handoffs_refused", "Handoffs refused", ["reason"], registry=registry)
        self._sent = Counter("muser_handoffs", "Handoffs ended", ["ending"], registry=registry)
        self._bytes = Counter("muser_handoff_bytes", "Payload bytes that left", registry=registry)
        self._segments = Counter("muser_segments_sent", "Segments that left", registry=registry)
        self._seconds = Histogram(
            "muser_handoff_seconds", "From begin to the last frame", ["ending"], buckets=SECONDS, registry=registry
        )
        self._tokens = Counter("muser_prompt_tokens", "Prompt tokens by origin", ["origin"], registry=registry)
        self._prefill = Histogram("muser_prefill_seconds", "Computation", buckets=SECONDS, registry=registry)
        self._waited = Counter("muser_reader_wait_seconds", "Computation held up by readers", registry=registry)
        self._rate = Histogram(
            "muser_prefill_tokens_per_second", "Rate of a computation", buckets=TOKENS_PER_S, registry=registry
        )

    def describe(self, identities: Identities, model: str, kernels: tuple[str, ...], now: Now) -> None:
        """Say what this node is, and read what is so now whenever the metrics are asked for."""
        self._registry.register(_Present(now, [build_info(identities, model), admitted(kernels)]))

    def exposition(self) -> bytes:
        """Return every metric in the text format."""
        return generate_latest(self._registry)

    def accepted(self) -> None:
        """See `Observer`."""
        self._accepted.inc()

    def refused(self, code: str) -> None:
        """See `Observer`."""
        self._refused.labels(code).inc()

    def computed(self, computed: Computed) -> None:
        """See `Observer`."""
        tokens = computed.tokens - computed.reused_tokens
        self._tokens.labels("memory").inc(computed.reused_tokens)
        self._tokens.labels("computed").inc(tokens)
        self._prefill.observe(computed.seconds)
        self._waited.inc(computed.waited_s)
        if tokens and computed.seconds > computed.waited_s:
            self._rate.observe(tokens / (computed.seconds - computed.waited_s))

    def sent(self, sent: Sent) -> None:
        """See `Observer`."""
        self._sent.labels(sent.code).inc()
        self._bytes.inc(sent.payload_nbytes)
        self._segments.inc(sent.segments)
        self._seconds.labels(sent.code).observe(sent.seconds)


class _Present(Collector):
    """What is so at this moment, and what never changes."""

    def __init__(self, now: Now, constant: list[Metric]) -> None:
        self._now, self._constant = now, constant

    def describe(self) -> list[Metric]:
        """Say nothing: to learn names, the registry would ask for values before there are any."""
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._now
        yield from self._constant
        yield GaugeMetricFamily("muser_handoffs_unfinished", "Computing, waiting or promised a place", now.unfinished())
        yield GaugeMetricFamily("muser_queue_seconds", "Expected wait of a handoff opened now", now.wait_s())
        yield GaugeMetricFamily("muser_chunk_seconds", "Expected computation of a chunk", now.seconds_per_chunk())
        if now.cache is not None:
            yield from _cache(now.cache())
        resident = resident_nbytes()
        if resident is not None:
            yield GaugeMetricFamily("muser_process_resident_bytes", "Resident memory", resident)
        yield GaugeMetricFamily("muser_process_peak_bytes", "Most memory ever resident", peak_nbytes())
        yield GaugeMetricFamily("muser_device_memory_bytes", "Memory of tensors on a GPU", now.device_nbytes())


def _cache(stats: Mapping[str, object]) -> Iterator[Metric]:
    def number(field: str) -> float:
        value = stats.get(field, 0)
        return float(value) if isinstance(value, int | float) else 0.0

    size = GaugeMetricFamily("muser_cache_bytes", "Bytes of kept prompts", labels=["tier"])
    size.add_metric(["memory"], number("memory_nbytes"))
    yield size
    yield GaugeMetricFamily("muser_cache_blocks", "Blocks of kept prompts", number("blocks"))
    events = CounterMetricFamily("muser_cache_events", "What happened to blocks", labels=["tier", "event"])
    for event, field in (("read", "fetched_memory"), ("evicted", "memory_evicted")):
        events.add_metric(["memory", event], number(field))
    yield events


class MetricsServer:
    """Answers GET /metrics on an address of its own; `port` 0 lets the system choose."""

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        """Bind.

        Raises:
            PortTaken: the port is in use, or the address is none of this machine's; the message names it.
        """
        self._server = _bound(host, port, metrics)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self.port = int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def served(host: str, port: int | None, metrics: Metrics) -> Iterator[dict[str, int]]:
    """Give metrics out inside the block; yield the port for the ready file, nothing where `port` is None.

    Raises:
        PortTaken: the port cannot be bound.
    """
    if port is None:
        yield {}
        return
    server = MetricsServer(host, port, metrics)
    server.start()
    try:
        yield {"metrics_port": server.port}
    finally:
        server.stop()


def _bound(host: str, port: int, metrics: Metrics) -> ThreadingHTTPServer:
    class Handler(_Handler):
        exposition = staticmethod(metrics.exposition)

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((host, port), Handler)
    except (OSError, UnicodeError) as error:
        raise port_taken("muser-prefill", host, port, error) from error


class _Handler(BaseHTTPRequestHandler):
    """Answers one request. It says nothing of itself, and logs nothing."""

    exposition: Callable[[], bytes]
    timeout = IDLE_S
    server_version = "muser"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"only {PATH} is here\n".encode())
            return
        self._answer(HTTPStatus.OK, CONTENT_TYPE, self.exposition())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library names it
        """Log nothing: who scrapes does it all the time."""
