"""`muser doctor`: looks for what is wrong, and says what to do about it."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from muser_wire.cli.interface import Interface, interface_to
from muser_wire.cli.link import (
    CALL_TIMEOUT_S,
    Finding,
    LinkProbe,
    Verdict,
    judge_eee,
    judge_idle,
    judge_mtu,
    judge_round_trip,
    judge_route,
    judge_throughput,
)
from muser_wire.errors import TransportError
from muser_wire.home import muser_home
from muser_wire.messages import decode_description, encode_describe_request
from muser_wire.pairing.trust import consumer_trust
from muser_wire.probe import MAX_STREAM_NBYTES
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel
from muser_wire.transport.malloc import raise_malloc_thresholds

DEFAULT_PRODUCER = "127.0.0.1:4950"
DEFAULT_IDLE_S = 45.0
"""Longer than any energy saving waits before it puts a link to sleep."""
DEFAULT_MIB = 256
EXIT_BAD = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser doctor` and its subcommands."""
    parser = commands.add_parser("doctor", help="look for what is wrong and say what to do")
    topics = parser.add_subparsers(required=True, metavar="TOPIC")
    link = topics.add_parser(
        "link", help="measure the link to a producer", description="Exit status 1: something is bad."
    )
    link.add_argument("--producer", default=DEFAULT_PRODUCER, metavar="HOST:PORT", help="its control port")
    link.add_argument(
        "--idle-s", type=float, default=DEFAULT_IDLE_S, help="silence before the late burst; 0: leave it out"
    )
    link.add_argument("--mib", type=_mib, default=DEFAULT_MIB, help="MiB to stream for the throughput, at most 1024")
    link.add_argument("--json", action="store_true", help="print one JSON object")
    link.set_defaults(run=run_link)


def run_link(arguments: argparse.Namespace) -> int:
    """Measure the link, print what was found; return 1 when something is bad."""
    raise_malloc_thresholds()
    host, port = _split(arguments.producer)
    way = interface_to(_address(host, port))
    trust = None if host in LOOPBACK_HOSTS else consumer_trust(muser_home(), host, time.time)
    channel = GrpcChannel(host, port, trust)
    try:
        description = decode_description(channel.describe(encode_describe_request(), CALL_TIMEOUT_S))
        probe = LinkProbe(channel, description.data_port)
        findings = list(examine(probe, way, arguments.mib << 20, arguments.idle_s))
    finally:
        channel.close()
    print("\n".join(_json_lines(findings) if arguments.json else _lines(findings)))
    return EXIT_BAD if any(finding.verdict is Verdict.BAD for finding in findings) else 0


def examine(probe: LinkProbe, way: Interface | None, nbytes: int, idle_s: float) -> Iterator[Finding]:
    """Yield one finding after another; the slow one comes last."""
    yield judge_route(way)
    yield judge_mtu(way)
    yield judge_eee(way)
    yield judge_round_trip(probe.round_trips())
    probe.stream_s(nbytes // 8 or 1)  # opens the window and the connection
    yield judge_throughput(nbytes, probe.stream_s(nbytes), way)
    burst_s = probe.burst_s()
    if idle_s:
        print(f"muser: waiting {idle_s:g} s in silence", file=sys.stderr)
        yield judge_idle(burst_s, probe.burst_after_idle_s(idle_s), idle_s)


def _mib(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_STREAM_NBYTES >> 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {MAX_STREAM_NBYTES >> 20}")
    return value


def _split(producer: str) -> tuple[str, int]:
    host, _, port = producer.rpartition(":")
    if not host or not port.isdecimal():
        raise TransportError(f"{producer!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _address(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise TransportError(f"host {host} cannot be resolved: {error}") from error


def _json_lines(findings: Sequence[Finding]) -> list[str]:
    rows = [
        {"name": f.name, "verdict": f.verdict.value, "value": f.value, "advice": f.advice, **f.numbers}
        for f in findings
    ]
    return [json.dumps({"findings": rows}, indent=2)]


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<8} {finding.name:<14} {finding.value}")
        if finding.advice:
            lines.append(" " * 9 + f"-> {finding.advice}")
    return lines
