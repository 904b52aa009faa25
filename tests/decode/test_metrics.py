from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from muser_decode.engine.request import Failed, Finished, FinishReason, Route, RouteReport
from muser_decode.metrics import Metrics, Now, held_code
from muser_decode.observer import HandoffEnd
from muser_wire.identities import Digest, Identities

IDENTITIES = Identities(
    spec_digest=Digest(b"\x01" * 32),
    tokenizer_digest=Digest(b"\x02" * 32),
    kv_layout="kv1/f16",
    lane="native",
    numerics_digest=Digest(b"\x03" * 32),
    chunk_tokens=128,
    weights_digest=Digest(b"\x04" * 32),
)
STATS = {
    "blocks": 5,
    "memory_nbytes": 1000,
    "disk_nbytes": 7000,
    "memory_evicted": 1,
    "fetched_memory": 2,
    "fetched_disk": 3,
    "disk_saved": 4,
    "disk_evicted": 6,
    "disk_invalid": 8,
    "disk_failed_writes": 9,
}


def producer(name: str, **facts: object) -> dict[str, object]:
    unmeasured = {"resting_s": 0.0, "wait_s": None, "tokens_per_s": None, "link_bytes_per_s": None}
    return {"name": name, "state": "ready", "reason": "", **unmeasured, **facts}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(IDENTITIES, "tiny")


def watched(metrics: Metrics, cache: Any = None, producers: Any = ()) -> Metrics:
    metrics.watch(Now(lambda: 2, lambda: 3, lambda: list(producers), cache, lambda: 77))
    return metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, read by Prometheus' own parser."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def test_a_prompt_is_counted_by_route_reason_and_origin(metrics: Metrics) -> None:
    report = RouteReport(
        Route.SALVAGED,
        "transport: gone",
        prefill_s=0.3,
        remote_tokens=500,
        local_tokens=40,
        memory_tokens=100,
        disk_tokens=20,
        peer_tokens=200,
        held_reason="differs at token 120",
    )
    metrics.routed(report, "transport")
    metrics.routed(
        RouteReport(Route.REMOTE, "", prefill_s=0.1, remote_tokens=10, held_reason="no block continues token 0"), "none"
    )
    assert value(metrics, "muser_requests_total", route="salvaged", reason="transport") == 1
    assert value(metrics, "muser_requests_total", route="remote", reason="none") == 1
    by_origin = {"memory": 100, "disk": 20, "peer": 200, "remote_computed": 310, "local_computed": 40}
    for origin, tokens in by_origin.items():
        assert value(metrics, "muser_prompt_tokens_total", origin=origin) == tokens
    assert value(metrics, "muser_cache_prompts_total", result="hit", reason="differs") == 1
    assert value(metrics, "muser_cache_prompts_total", result="miss", reason="no_block") == 1
    assert value(metrics, "muser_prefill_seconds_sum", route="salvaged") == pytest.approx(0.3)


def test_without_a_cache_no_lookup_is_counted(metrics: Metrics) -> None:
    metrics.routed(RouteReport(Route.LOCAL, "x", prefill_s=0.1, local_tokens=9), "no_producer")
    assert not [name for name, _ in samples(metrics) if name.startswith("muser_cache_prompts_total")]


def test_generations_are_counted_by_how_they_ended(metrics: Metrics) -> None:
    metrics.ended(Route.REMOTE, Finished(FinishReason.STOP, 30, first_token_s=0.4, decode_s=1.5))
    metrics.ended(Route.REMOTE, Finished(FinishReason.CANCELLED, 5, first_token_s=0.2, decode_s=0.1))
    metrics.ended(None, Finished(FinishReason.CANCELLED, 0, first_token_s=0.0, decode_s=0.0))
    metrics.ended(Route.LOCAL, Failed("broke"))
    metrics.refused("engine_busy")
    assert value(metrics, "muser_requests_ended_total", route="remote", ending="stop") == 1
    assert value(metrics, "muser_requests_ended_total", route="none", ending="cancelled") == 1
    assert value(metrics, "muser_requests_ended_total", route="local", ending="failed") == 1
    assert value(metrics, "muser_requests_refused_total", reason="engine_busy") == 1
    assert value(metrics, "muser_generated_tokens_total") == 35
    assert value(metrics, "muser_time_to_first_token_seconds_count", route="remote") == 2
    # 20 tokens a second; a cancelled one says nothing of the rate.
    assert value(metrics, "muser_decode_tokens_per_second_count") == 1
    assert value(metrics, "muser_decode_tokens_per_second_bucket", le="20.0") == 1
    assert value(metrics, "muser_decode_tokens_per_second_bucket", le="10.0") == 0


def test_handoffs_are_counted_by_producer_and_code(metrics: Metrics) -> None:
    metrics.handoff_ended(HandoffEnd("a:1", "sealed", 0.5, 4, 4096, frame_refused=False))
    metrics.handoff_ended(HandoffEnd("b:1", "frame", 0.1, 1, 1024, frame_refused=True))
    metrics.handoff_ended(HandoffEnd("b:1", "transport", 0.1, 0, 0, frame_refused=False))
    assert value(metrics, "muser_handoffs_total", producer="a:1", ending="sealed") == 1
    assert value(metrics, "muser_handoff_bytes_total", producer="b:1") == 1024
    assert value(metrics, "muser_segments_verified_total", producer="a:1") == 4
    assert value(metrics, "muser_segments_refused_total", producer="b:1", reason="frame") == 1
    assert value(metrics, "muser_handoff_seconds_count", producer="b:1") == 2
    refused = [labels for name, labels in samples(metrics) if name == "muser_segments_refused_total"]
    assert len(refused) == 1


def test_what_is_so_now_is_read_when_asked(metrics: Metrics) -> None:
    producers = [
        producer("a:1", wait_s=0.5, tokens_per_s=900.0, link_bytes_per_s=5e8),
        producer("b:1", state="refused", resting_s=2.0),
    ]
    watched(metrics, cache=lambda: STATS, producers=producers)
    assert (value(metrics, "muser_requests_active"), value(metrics, "muser_requests_waiting")) == (2, 3)
    assert value(metrics, "muser_producer_ready", producer="a:1") == 1
    assert value(metrics, "muser_producer_ready", producer="b:1") == 0
    assert value(metrics, "muser_producer_resting_seconds", producer="b:1") == 2.0
    assert value(metrics, "muser_producer_link_bytes_per_second", producer="a:1") == 5e8
    assert ("muser_producer_wait_seconds", (("producer", "b:1"),)) not in samples(metrics)
    assert value(metrics, "muser_cache_bytes", tier="disk") == 7000
    assert value(metrics, "muser_cache_events_total", tier="disk", event="not_written") == 9
    assert value(metrics, "muser_device_memory_bytes") == 77
    assert value(metrics, "muser_process_peak_bytes") > 1 << 20


def test_nothing_kept_shows_no_cache(metrics: Metrics) -> None:
    assert not [name for name, _ in samples(watched(metrics)) if name in ("muser_cache_bytes", "muser_cache_blocks")]


def test_build_info_has_the_identities(metrics: Metrics) -> None:
    (labels,) = [dict(labels) for name, labels in samples(metrics) if name == "muser_build_info"]
    assert labels.pop("version")
    assert labels == {
        "model": "tiny",
        "lane": "native",
        "kv_layout": "kv1/f16",
        "chunk_tokens": "128",
        "spec_digest": "01" * 32,
        "tokenizer_digest": "02" * 32,
        "numerics_digest": "03" * 32,
        "weights_digest": "04" * 32,
    }


def test_kernels_that_run_here_are_named() -> None:
    assert (
        value(
            Metrics(IDENTITIES, "a", ("exact.decoder.compiled",)),
            "muser_kernel_admitted",
            kernel="exact.decoder.compiled",
        )
        == 1
    )
    assert not [name for name, _ in samples(Metrics(IDENTITIES, "a")) if name == "muser_kernel_admitted"]


def test_two_nodes_in_one_process_count_apart() -> None:
    first, second = Metrics(IDENTITIES, "a"), Metrics(IDENTITIES, "b")
    first.refused("engine_busy")
    assert not [name for name, _ in samples(second) if name == "muser_requests_refused_total"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("all held", "all_held"),
        ("differs at token 9", "differs"),
        ("nothing held goes beyond token 0", "nothing_beyond"),
        ("no block continues token 128", "no_block"),
        ("only 7 tokens are held", "too_short"),
        ("the block at token 128 was lost or damaged", "lost"),
        ("what a later version says", "other"),
    ],
)
def test_reasons_of_the_cache_have_stable_codes(reason: str, code: str) -> None:
    assert held_code(reason) == code
