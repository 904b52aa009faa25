"""The producer's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from muser_wire.cli.node import add_process, node_parser
from muser_wire.errors import LocalProtocolError, NumericsMismatch
from muser_wire.flags import port, whole
from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.numerics import Lane, check_element
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, MAX_CHUNK_TOKENS
from muser_wire.transport import discovery
from muser_wire.transport.grpc import DATA_THREADS

COMPUTE_TYPES = ("bf16", "f32")
DEFAULT_DTYPE = "bf16"
MAX_THREADS = 1024
MAX_WAITING = DATA_THREADS - 2
"""Each waiting handoff holds a thread of the data port; one computes, and one is for a probe."""
MAX_CACHE_MB = 1_000_000_000

DEFAULT_CACHE_MEMORY_MB = 1024
"""A few long prompts of a large model. Memory is taken as prompts come, not at the start."""

chunk_tokens = whole(1, MAX_CHUNK_TOKENS)


@dataclass(frozen=True)
class PrefillConfig:
    """How to serve one model. Ports 0 let the system choose; `threads` 0 leaves torch's own choice.

    `dtype` is of the native lane; the reference lane, which computes with integers, has none.

    `max_rate` is in bytes a second, 0: as fast as the link takes them [5.10]. `metrics_port` None: none is opened.
    """

    model: Path
    host: str
    control_port: int
    data_port: int
    lane: Lane
    dtype: str | None
    kv_element: ElementType
    device: str
    threads: int
    chunk_tokens: int
    max_waiting: int
    cache_memory_mb: int
    drain_s: float
    max_rate: float
    announce: bool
    metrics_host: str
    metrics_port: int | None
    ready_file: Path | None
    trace: Path | None
    log_level: str
    log_format: str


_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)")
_RATE_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def rate(text: str) -> float:
    """Return a rate in bytes a second. Other units are refused: Gb and GB are mixed up too easily.

    >>> rate("1.25G")
    1250000000.0
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes a second, such as 500M or 1.1G (k, M or G)")
    return float(match[1]) * _RATE_UNITS[match[2]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command. Parsed, `keys` are the keys of the configuration."""
    return node_parser("prefill", "Muser's producer: prefills and streams KV", add_arguments, from_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-prefill serve`. Each is a key of the configuration file too, its group the table."""
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_sizes(parser.add_argument_group("sizes"))
    add_process(parser.add_argument_group("process"), "handoffs")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    group.add_argument(
        "--lane",
        choices=[lane.value for lane in Lane],
        default=Lane.NATIVE.value,
        help="native: this node's fastest arithmetic; reference: the same bytes on every machine",
    )
    group.add_argument("--dtype", choices=COMPUTE_TYPES, help="compute type of the native lane (default: bf16)")
    group.add_argument(
        "--kv", choices=[e.value for e in ElementType], help="element type of keys and values; reference lane: f16"
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; auto: cuda where torch has it")


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    group.add_argument("--control-port", type=port, default=4950, help="TCP port of Describe and Open; 0: any")
    group.add_argument("--data-port", type=port, default=4951, help="TCP port of Stream; 0: any")
    group.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="say on the local link that this producer is there, by multicast DNS",
    )
    group.add_argument("--metrics-port", type=port, help="TCP port of Prometheus' GET /metrics; 0: any; default: none")
    group.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        help="address of that port, which has no authentication (default: %(default)s)",
    )
    group.add_argument(
        "--max-rate", type=rate, default=0.0, help="bytes a second that may leave, such as 1.1G (k, M, G); 0: no limit"
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--threads", type=whole(0, MAX_THREADS), default=0, help="CPU threads of torch; 0: its own choice"
    )
    group.add_argument("--chunk-tokens", type=chunk_tokens, default=DEFAULT_CHUNK_TOKENS, help="the grid, in tokens")
    group.add_argument(
        "--max-waiting", type=whole(0, MAX_WAITING), default=4, help="handoffs that may wait for the one computing"
    )
    group.add_argument(
        "--cache-memory-mb",
        type=whole(0, MAX_CACHE_MB),
        default=DEFAULT_CACHE_MEMORY_MB,
        help="host memory for computed prompts, in MB (default: %(default)s); 0: none are kept",
    )


def types(lane: Lane, dtype: str | None, kv: str | None) -> tuple[str | None, ElementType]:
    """Return the compute type and the element type of a lane, from what was asked for.

    Raises:
        NumericsMismatch: the lane does not have it.
    """
    if lane is Lane.REFERENCE:
        if dtype is not None:
            raise NumericsMismatch(f"--dtype {dtype} is of the native lane; the reference lane computes with integers")
        element = ElementType(kv) if kv else ElementType.F16
        check_element(lane, element)
        return None, element
    dtype = dtype or DEFAULT_DTYPE
    return dtype, ElementType(kv) if kv else COMPUTE_ELEMENTS[dtype]


def check_announcement(host: str) -> None:
    """Check that a producer that binds `host` can be announced.

    Raises:
        LocalProtocolError: no other machine reaches it, or the package for it is missing.
    """
    if not discovery.reachable(host):
        raise LocalProtocolError(f"--announce: no other machine reaches --host {host}")
    if not discovery.available():
        raise LocalProtocolError(f"--announce needs the package zeroconf: {discovery.HINT}")


def from_arguments(arguments: argparse.Namespace) -> PrefillConfig:
    """Return the configuration that parsed flags describe.

    Raises:
        NumericsMismatch: the lane does not have a type that was asked for.
        LocalProtocolError: nobody could be told of this producer, or would reach it.
    """
    if arguments.announce:
        check_announcement(arguments.host)
    lane = Lane(arguments.lane)
    dtype, element = types(lane, arguments.dtype, arguments.kv)
    return PrefillConfig(
        model=arguments.model,
        host=arguments.host,
        control_port=arguments.control_port,
        data_port=arguments.data_port,
        lane=lane,
        dtype=dtype,
        kv_element=element,
        device=arguments.device,
        threads=arguments.threads,
        chunk_tokens=arguments.chunk_tokens,
        max_waiting=arguments.max_waiting,
        cache_memory_mb=arguments.cache_memory_mb,
        drain_s=arguments.drain_s,
        max_rate=arguments.max_rate,
        announce=arguments.announce,
        metrics_host=arguments.metrics_host,
        metrics_port=arguments.metrics_port,
        ready_file=arguments.ready_file,
        trace=arguments.trace,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
    )
