"""What a link can do, and what is wrong with it: measurements through the product's own transport, with verdicts."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

from muser_wire.cli.interface import Interface
from muser_wire.doctor.finding import Finding, Numbers, Verdict
from muser_wire.errors import TransportError
from muser_wire.messages import encode_stream_request
from muser_wire.probe import (
    decode_probe_answer,
    decode_probe_ticket,
    encode_open_probe,
    encode_probe,
    piece_nbytes,
)
from muser_wire.transport.grpc import GrpcChannel

CALL_TIMEOUT_S = 5.0
STREAM_TIMEOUT_S = 60.0
ECHO = bytes(64)
ROUND_TRIPS = 200
BURST_NBYTES = 8 << 20
"""A burst: a few chunks' segments of a small model, 7 ms of a 10 Gbit/s link."""
BURSTS = 5

GOOD_SHARE = 0.8
POOR_SHARE = 0.5
"""Parts of the interface's rate: framing and TCP leave 0.94 of it."""
GOOD_ROUND_TRIP_S = 0.002
POOR_ROUND_TRIP_S = 0.010
LEAST_MTU = 1500
JUMBO_MTU = 9000


class LinkProbe:
    """Measures through one connection to a producer. Times in seconds."""

    def __init__(self, channel: GrpcChannel, data_port: int) -> None:
        self._channel = channel
        self._data_port = data_port

    def round_trips(self, count: int = ROUND_TRIPS) -> list[float]:
        """Return how long each of `count` echoes took; one before them opens the connection."""
        return [self._round_trip() for _ in range(count + 1)][1:]

    def stream_s(self, nbytes: int) -> float:
        """Return the time from asking for a stream to its last byte.

        Raises:
            TransportError: it broke, or took too long.
        """
        started = time.perf_counter()
        ticket = decode_probe_ticket(self._channel.open_probe(encode_open_probe(nbytes), CALL_TIMEOUT_S))
        stream = self._channel.stream_probe(encode_stream_request(ticket), self._data_port)
        watch = threading.Timer(STREAM_TIMEOUT_S, stream.cancel)
        watch.start()
        try:
            received = sum(map(piece_nbytes, stream))
        finally:
            watch.cancel()
        if received != nbytes:
            raise TransportError(f"the probe's stream ended after {received} of {nbytes} bytes")
        return time.perf_counter() - started

    def burst_s(self) -> float:
        """Return the median time of a burst on a link that is awake."""
        return statistics.median([self.stream_s(BURST_NBYTES) for _ in range(BURSTS + 1)][1:])

    def burst_after_idle_s(self, idle_s: float, sleep: Callable[[float], None] = time.sleep) -> float:
        """Return the time of the first burst after `idle_s` seconds without a byte from here."""
        sleep(idle_s)
        return self.stream_s(BURST_NBYTES)

    def _round_trip(self) -> float:
        started = time.perf_counter()
        decode_probe_answer(self._channel.probe(encode_probe(ECHO), CALL_TIMEOUT_S), ECHO)
        return time.perf_counter() - started


def judge_throughput(nbytes: int, seconds: float, way: Interface | None) -> Finding:
    """Judge a stream of `nbytes` against the rate that the interface claims."""
    rate = nbytes / seconds
    value = f"{rate / 1e9:.3f} GB/s"
    numbers: Numbers = {"bytes_per_s": rate, "nbytes": nbytes}
    if way is None or way.is_loopback or way.speed_bits is None:
        return Finding("throughput", Verdict.UNKNOWN, value, "the interface does not tell its own rate", numbers)
    share = rate * 8 / way.speed_bits
    value += f", {share:.0%} of {way.speed_bits / 1e9:g} Gbit/s"
    numbers["share"] = share
    if share >= GOOD_SHARE:
        return Finding("throughput", Verdict.OK, value, "", numbers)
    advice = "look for other traffic, a bad cable, a slower port between the two, or a busy processor"
    return Finding("throughput", Verdict.WARN if share >= POOR_SHARE else Verdict.BAD, value, advice, numbers)


def judge_round_trip(samples: Sequence[float]) -> Finding:
    """Judge echoes: the median tells the path, the 99th percentile its steadiness."""
    median = statistics.median(samples)
    p99 = sorted(samples)[min(len(samples) - 1, len(samples) * 99 // 100)]
    value = f"median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms"
    numbers: Numbers = {"median_s": median, "p99_s": p99}
    if median > POOR_ROUND_TRIP_S:
        advice = "this is no local network: use a cable, one switch, no VPN"
        return Finding("round trip", Verdict.BAD, value, advice, numbers)
    if median > GOOD_ROUND_TRIP_S or p99 > POOR_ROUND_TRIP_S:
        advice = "slow or unsteady: look for Wi-Fi, other traffic, power saving, a busy processor"
        return Finding("round trip", Verdict.WARN, value, advice, numbers)
    return Finding("round trip", Verdict.OK, value, "", numbers)


def judge_idle(burst_s: float, after_idle_s: float, idle_s: float) -> Finding:
    """Judge the first burst after silence against one on a link that is awake: links that save energy wake slowly."""
    value = f"burst {burst_s * 1e3:.1f} ms; after {idle_s:g} s of silence {after_idle_s * 1e3:.1f} ms"
    numbers: Numbers = {
        "burst_s": burst_s,
        "after_idle_s": after_idle_s,
        "idle_s": idle_s,
    }
    if after_idle_s <= 2 * burst_s + 0.005:
        return Finding("after idle", Verdict.OK, value, "", numbers)
    advice = "switch Energy-Efficient Ethernet and other power saving off, on both machines and on the switch"
    bad = after_idle_s > 5 * burst_s + 0.05
    return Finding("after idle", Verdict.BAD if bad else Verdict.WARN, value, advice, numbers)


def judge_route(way: Interface | None) -> Finding:
    """Judge the way: the same cable or switch is good, a router or the air is not."""
    if way is None:
        return Finding("route", Verdict.UNKNOWN, "not known", "the system's routing tool did not answer")
    value = f"{way.name} from {way.source or 'an unknown address'}" + (f" through {way.gateway}" if way.gateway else "")
    numbers: Numbers = {
        "interface": way.name,
        "source": way.source,
        "gateway": way.gateway,
        "wireless": way.wireless,
    }
    if way.gateway:
        advice = f"bytes pass the router {way.gateway}: put both machines on one network"
        return Finding("route", Verdict.WARN, value, advice, numbers)
    if way.wireless:
        return Finding("route", Verdict.WARN, value, "this is Wi-Fi: use a cable", numbers)
    return Finding("route", Verdict.OK, value, "", numbers)


def judge_mtu(way: Interface | None) -> Finding:
    """Judge the interface's MTU; what lies between is not looked at."""
    if way is None or way.mtu is None:
        return Finding("mtu", Verdict.UNKNOWN, "not known", "the system did not tell")
    numbers: Numbers = {"mtu": way.mtu}
    if way.mtu < LEAST_MTU:
        advice = f"below {LEAST_MTU}: a tunnel or VPN is in the way, or a setting is wrong"
        return Finding("mtu", Verdict.WARN, f"{way.mtu} bytes", advice, numbers)
    advice = (
        "" if way.mtu >= JUMBO_MTU else f"{JUMBO_MTU} on both machines and the switch would save some processor time"
    )
    return Finding("mtu", Verdict.OK, f"{way.mtu} bytes", advice, numbers)


def judge_eee(way: Interface | None) -> Finding:
    """Judge Energy-Efficient Ethernet, which puts a quiet link to sleep."""
    if way is None or way.eee is None:
        return Finding("energy saving", Verdict.UNKNOWN, "not known", "the interface has none, or no tool tells")
    if not way.eee:
        return Finding("energy saving", Verdict.OK, "off", "", {"eee": False})
    advice = f"Linux: ethtool --set-eee {way.name} eee off; macOS: Network settings, Hardware, configure manually"
    return Finding("energy saving", Verdict.WARN, "Energy-Efficient Ethernet is on", advice, {"eee": True})
