from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from muser_prefill.metrics import Metrics, MetricsServer, Now, served
from muser_prefill.observer import Computed, Sent
from muser_wire.identities import Digest, Identities
from muser_wire.transport.ports import PortTaken

D = Digest(bytes(32))
IDENTITIES = Identities(D, D, "kv1/f16", "native", D, 128, D)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics.exposition().decode())[name, tuple(sorted(labels.items()))]


def test_handoffs_are_counted_by_what_became_of_them(metrics: Metrics) -> None:
    metrics.accepted()
    metrics.refused("busy")
    metrics.sent(Sent("sealed", 4, 4096, 0.5))
    metrics.sent(Sent("gone", 1, 1024, 0.1))
    assert value(metrics, "muser_handoffs_accepted_total") == 1
    assert value(metrics, "muser_handoffs_refused_total", reason="busy") == 1
    assert value(metrics, "muser_handoffs_total", ending="gone") == 1
    assert (value(metrics, "muser_handoff_bytes_total"), value(metrics, "muser_segments_sent_total")) == (5120, 5)
    assert value(metrics, "muser_handoff_seconds_sum", ending="sealed") == 0.5


def test_tokens_from_its_own_cache_are_told_apart(metrics: Metrics) -> None:
    metrics.computed(Computed(tokens=1000, reused_tokens=600, seconds=1.5, waited_s=0.5))
    assert value(metrics, "muser_prompt_tokens_total", origin="memory") == 600
    assert value(metrics, "muser_prompt_tokens_total", origin="computed") == 400
    assert value(metrics, "muser_reader_wait_seconds_total") == 0.5
    # 400 tokens in the second that the reader left to it.
    assert value(metrics, "muser_prefill_tokens_per_second_sum") == 400
    metrics.computed(Computed(tokens=1000, reused_tokens=1000, seconds=0.1, waited_s=0.0))
    assert value(metrics, "muser_prefill_tokens_per_second_count") == 1


def test_what_is_so_now_is_read_when_asked(metrics: Metrics) -> None:
    stats = {"blocks": 3, "memory_nbytes": 99, "fetched_memory": 5, "memory_evicted": 1}
    now = Now(lambda: 2, lambda: 0.25, lambda: 0.125, lambda: stats, lambda: 11)
    metrics.describe(IDENTITIES, "tiny", ("attention.chunked", "linear.packed"), now)
    assert value(metrics, "muser_handoffs_unfinished") == 2
    assert (value(metrics, "muser_queue_seconds"), value(metrics, "muser_chunk_seconds")) == (0.25, 0.125)
    assert value(metrics, "muser_kernel_admitted", kernel="linear.packed") == 1
    assert value(metrics, "muser_cache_bytes", tier="memory") == 99
    assert value(metrics, "muser_cache_events_total", tier="memory", event="read") == 5
    assert value(metrics, "muser_device_memory_bytes") == 11
    assert [name for name in samples(metrics.exposition().decode()) if name[0] == "muser_build_info"]


@pytest.fixture
def port(metrics: Metrics) -> Iterator[int]:
    with served("127.0.0.1", 0, metrics) as ports:
        yield ports["metrics_port"]


def get(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    answer = response.status, {name.lower(): text for name, text in response.getheaders()}, response.read().decode()
    connection.close()
    return answer


def test_the_port_gives_out_what_is_counted_and_nothing_else(metrics: Metrics, port: int) -> None:
    metrics.refused("busy")
    status, headers, text = get(port, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert samples(text)["muser_handoffs_refused_total", (("reason", "busy"),)] == 1
    assert get(port, "/metrics?name[]=x")[0] == 200
    assert get(port, "/")[0] == 404
    assert get(port, "/../metrics")[0] == 404
    assert get(port, "/metrics", "POST")[0] == 501
    assert "python" not in headers["server"].lower()


def test_a_scrape_is_not_held_up_by_a_connection_that_says_nothing(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/metrics")[0] == 200


def test_without_a_port_none_is_opened(metrics: Metrics) -> None:
    with served("127.0.0.1", None, metrics) as ports:
        assert ports == {}


def test_a_taken_port_is_named(metrics: Metrics, port: int) -> None:
    with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 cannot be bound: another process"):
        MetricsServer("127.0.0.1", port, metrics)


def test_the_port_is_free_afterwards(metrics: Metrics) -> None:
    with served("127.0.0.1", 0, metrics) as ports:
        pass
    with served("127.0.0.1", ports["metrics_port"], metrics) as again:
        assert again == ports
