"""The producer's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from muser_wire.flags import new_file, port, seconds, whole
from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, MAX_CHUNK_TOKENS
from muser_wire.transport.grpc import DATA_THREADS

COMPUTE_TYPES = ("bf16", "f32")
MAX_THREADS = 1024
MAX_WAITING = DATA_THREADS - 2
"""Each waiting handoff holds a thread of the data port; one computes, and one is for a probe."""
MAX_CACHE_MB = 1_000_000_000

chunk_tokens = whole(1, MAX_CHUNK_TOKENS)


@dataclass(frozen=True)
class PrefillConfig:
    """How to serve one model. Ports 0 let the system choose; `threads` 0 leaves torch's own choice.

    `max_rate` is in bytes a second, 0: as fast as the link takes them [5.10].
    """

    model: Path
    host: str
    control_port: int
    data_port: int
    dtype: str
    kv_element: ElementType
    device: str
    threads: int
    chunk_tokens: int
    max_waiting: int
    cache_memory_mb: int
    drain_s: float
    max_rate: float
    ready_file: Path | None
    trace: Path | None
    log_level: str


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-prefill serve`."""
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    parser.add_argument("--control-port", type=port, default=4950, help="TCP port of Describe and Open; 0: any")
    parser.add_argument("--data-port", type=port, default=4951, help="TCP port of Stream; 0: any")
    parser.add_argument("--dtype", choices=COMPUTE_TYPES, default="bf16", help="compute type")
    parser.add_argument("--kv", choices=[e.value for e in ElementType], help="element type of keys and values")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; auto: cuda where torch has it")
    parser.add_argument(
        "--threads", type=whole(0, MAX_THREADS), default=0, help="CPU threads of torch; 0: its own choice"
    )
    parser.add_argument("--chunk-tokens", type=chunk_tokens, default=DEFAULT_CHUNK_TOKENS, help="the grid, in tokens")
    parser.add_argument(
        "--max-waiting", type=whole(0, MAX_WAITING), default=4, help="handoffs that may wait for the one computing"
    )
    parser.add_argument(
        "--cache-memory-mb",
        type=whole(0, MAX_CACHE_MB),
        default=0,
        help="host memory for computed prompts, in MB; 0: none are kept",
    )
    parser.add_argument("--drain-s", type=seconds, default=30.0, help="seconds that SIGTERM leaves to running handoffs")
    parser.add_argument(
        "--max-rate", type=rate, default=0.0, help="bytes a second that may leave, such as 1.1G (k, M, G); 0: no limit"
    )
    parser.add_argument("--ready-file", type=new_file, help="written as JSON once the node serves")
    parser.add_argument("--trace", type=new_file, help="append where the time of handoffs goes, as JSON lines")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def from_arguments(arguments: argparse.Namespace) -> PrefillConfig:
    """Return the configuration that parsed flags describe."""
    return PrefillConfig(
        model=arguments.model,
        host=arguments.host,
        control_port=arguments.control_port,
        data_port=arguments.data_port,
        dtype=arguments.dtype,
        kv_element=ElementType(arguments.kv) if arguments.kv else COMPUTE_ELEMENTS[arguments.dtype],
        device=arguments.device,
        threads=arguments.threads,
        chunk_tokens=arguments.chunk_tokens,
        max_waiting=arguments.max_waiting,
        cache_memory_mb=arguments.cache_memory_mb,
        drain_s=arguments.drain_s,
        max_rate=arguments.max_rate,
        ready_file=arguments.ready_file,
        trace=arguments.trace,
        log_level=arguments.log_level,
    )
