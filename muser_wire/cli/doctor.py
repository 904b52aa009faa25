"""`muser doctor`: looks for what is wrong, and says what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from muser_wire.cli.interface import Interface, interface_to
from muser_wire.cli.link import (
    CALL_TIMEOUT_S,
    LinkProbe,
    judge_eee,
    judge_idle,
    judge_mtu,
    judge_round_trip,
    judge_route,
    judge_throughput,
)
from muser_wire.doctor.facts import ask
from muser_wire.doctor.finding import Finding, Verdict, bad, json_text, table_text
from muser_wire.doctor.machine import check_disk, check_home, check_packages, check_python, installed_nodes
from muser_wire.doctor.node import Facts, check_node
from muser_wire.doctor.peers import check_own_keys, check_pairing, check_producer
from muser_wire.doctor.ports import is_muser
from muser_wire.doctor.service import check_agent, check_unit
from muser_wire.errors import TransportError, WireError
from muser_wire.home import muser_home
from muser_wire.messages import decode_description, encode_describe_request
from muser_wire.pairing.trust import consumer_trust
from muser_wire.probe import MAX_STREAM_NBYTES
from muser_wire.services.launchd import Launchd
from muser_wire.services.systemd import Systemd
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel
from muser_wire.transport.malloc import raise_malloc_thresholds

DEFAULT_PRODUCER = "127.0.0.1:4950"
DEFAULT_IDLE_S = 45.0
"""Longer than any energy saving waits before it puts a link to sleep."""
DEFAULT_MIB = 256
CHECKED_MIB = 64
"""What the whole check streams from each producer: it shall not take long."""
EXIT_BAD = 1
NAME_WIDTH = 34
MEGABYTE = 1_000_000
EXIT_STATUS = "Exit status 1: something is bad."


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser doctor` and its subcommands."""
    parser = commands.add_parser("doctor", help="look for what is wrong and say what to do", description=EXIT_STATUS)
    parser.add_argument(
        "--node", choices=["prefill", "decode", "both"], help="which one this machine is (default: those installed)"
    )
    parser.add_argument("--config", help="configuration file of the node, as of its serve command")
    parser.add_argument(
        "--model", action=argparse.BooleanOptionalAction, default=True, help="read the model's weights, every one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_all)
    topics = parser.add_subparsers(metavar="TOPIC")
    link = topics.add_parser("link", help="measure the link to a producer", description=EXIT_STATUS)
    link.add_argument("--producer", default=DEFAULT_PRODUCER, metavar="HOST:PORT", help="its control port")
    link.add_argument(
        "--idle-s", type=float, default=DEFAULT_IDLE_S, help="silence before the late burst; 0: leave it out"
    )
    link.add_argument("--mib", type=_mib, default=DEFAULT_MIB, help="MiB to stream for the throughput, at most 1024")
    link.add_argument("--json", action="store_true", help="print one JSON object")
    link.set_defaults(run=run_link)


def run_all(arguments: argparse.Namespace) -> int:
    """Check this machine, its nodes and their link; print what was found; return 1 when something is bad."""
    raise_malloc_thresholds()
    nodes = {"both": ["prefill", "decode"], None: installed_nodes()}.get(arguments.node, [arguments.node])
    findings = []
    for finding in examine_machine(nodes, arguments):
        findings.append(finding)
        if not arguments.json:
            print(table_text([finding], NAME_WIDTH), flush=True)
    return _told(findings, arguments, print_table=False)


def examine_machine(nodes: Sequence[str], arguments: argparse.Namespace) -> Iterator[Finding]:
    """Yield one finding after another, the quick ones first."""
    # What the log would say of damaged files stands in the findings.
    logging.getLogger("muser_wire").addHandler(logging.NullHandler())
    home = muser_home()
    yield check_python()
    yield from check_packages(list(nodes))
    yield check_home(home)
    facts = {node: ask(node, arguments.config, model=arguments.model) for node in nodes}
    cache_mb = max((one.get("configuration", {}).get("cache_disk_mb", 0) for one in facts.values()), default=0)
    yield check_disk(home, cache_mb * MEGABYTE)
    yield from check_own_keys(home, time.time())
    yield from check_pairing(home, time.time())
    for node in nodes:
        yield from check_node(node, facts[node], partial(is_muser, home), named=arguments.node is not None)
        yield check_unit(Systemd()) if node == "prefill" else check_agent(Launchd())
        for host, port in facts[node].get("configuration", {}).get("producers", ()):
            yield from examine_producer(home, host, port, facts[node])


def examine_producer(home: Path, host: str, port: int, facts: Facts) -> Iterator[Finding]:
    """Yield what is found about a producer that the decode node is to use, and about the way to it."""
    ours = facts["model"].get("identities")
    found = check_producer(home, host, port, ours, unqualified=facts["configuration"]["allow_unqualified"])
    yield from found
    if found[0].verdict is Verdict.OK:
        try:
            for finding in examine_link(host, port, CHECKED_MIB << 20, 0.0):
                yield dataclasses.replace(finding, name=f"link {host}: {finding.name}")
        except WireError as error:
            # The control port answered a moment ago.
            advice = (
                "let that machine's firewall pass its data port as well (4951, or its --data-port); is the cable in?"
            )
            yield bad(f"link {host}", str(error), advice)


def run_link(arguments: argparse.Namespace) -> int:
    """Measure the link, print what was found; return 1 when something is bad."""
    raise_malloc_thresholds()
    host, port = _split(arguments.producer)
    findings = list(examine_link(host, port, arguments.mib << 20, arguments.idle_s))
    return _told(findings, arguments, print_table=True)


def examine_link(host: str, port: int, nbytes: int, idle_s: float) -> Iterator[Finding]:
    """Yield what is found about the way to a producer.

    Raises:
        TransportError: it does not answer, or the link broke.
    """
    way = interface_to(_address(host, port))
    trust = None if host in LOOPBACK_HOSTS else consumer_trust(muser_home(), host, time.time)
    channel = GrpcChannel(host, port, trust)
    try:
        description = decode_description(channel.describe(encode_describe_request(), CALL_TIMEOUT_S))
        yield from examine(LinkProbe(channel, description.data_port), way, nbytes, idle_s)
    finally:
        channel.close()


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


def _told(findings: Sequence[Finding], arguments: argparse.Namespace, *, print_table: bool) -> int:
    """Print the findings; return the exit status."""
    if arguments.json:
        print(json_text(findings))
    elif print_table:
        print(table_text(findings))
    return EXIT_BAD if any(finding.verdict is Verdict.BAD for finding in findings) else 0


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
