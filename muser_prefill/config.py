"""The producer's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS


@dataclass(frozen=True)
class PrefillConfig:
    """How to serve one model. Ports 0 let the system choose; `threads` 0 leaves torch's own choice."""

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
    drain_s: float
    ready_file: Path | None
    trace: Path | None
    log_level: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-prefill serve`."""
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    parser.add_argument("--control-port", type=int, default=4950, help="TCP port of Describe and Open; 0: any")
    parser.add_argument("--data-port", type=int, default=4951, help="TCP port of Stream; 0: any")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_ELEMENTS), default="bf16", help="compute type")
    parser.add_argument("--kv", choices=[e.value for e in ElementType], help="element type of keys and values")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; auto: cuda where torch has it")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch; 0: its own choice")
    parser.add_argument("--chunk-tokens", type=int, default=DEFAULT_CHUNK_TOKENS, help="the grid, in tokens")
    parser.add_argument("--max-waiting", type=int, default=4, help="handoffs that may wait for the one computing")
    parser.add_argument("--drain-s", type=float, default=30.0, help="seconds that SIGTERM leaves to running handoffs")
    parser.add_argument("--ready-file", type=Path, help="written as JSON once the node serves")
    parser.add_argument("--trace", type=Path, help="append where the time of handoffs goes, as JSON lines")
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
        drain_s=arguments.drain_s,
        ready_file=arguments.ready_file,
        trace=arguments.trace,
        log_level=arguments.log_level,
    )
