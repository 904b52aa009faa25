"""What both nodes' metrics begin with: what the node is, in Prometheus' terms.

Both extras bring the client library; nothing else of this package needs it.
"""

from __future__ import annotations

from importlib import metadata

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from muser_wire.identities import Identities

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Upper bounds of histograms of durations."""


def build_info(identities: Identities, model: str) -> Metric:
    """Return the constant metric that says what is served."""
    info = InfoMetricFamily("muser_build", "What this node is; digests in hexadecimal")
    facts = {
        "version": metadata.version("muser"),
        "model": model,
        "lane": identities.lane,
        "kv_layout": identities.kv_layout,
        "chunk_tokens": str(identities.chunk_tokens),
        "spec_digest": identities.spec_digest.hex(),
        "tokenizer_digest": identities.tokenizer_digest.hex(),
        "weights_digest": identities.weights_digest.hex(),
        "numerics_digest": identities.numerics_digest.hex(),
    }
    info.add_metric([], facts)
    return info


def admitted(kernels: tuple[str, ...]) -> Metric:
    """Return which kernels run here."""
    family = GaugeMetricFamily("muser_kernel_admitted", "1: the kernel equals its reference here", labels=["kernel"])
    for name in kernels:
        family.add_metric([name], 1.0)
    return family
