"""The decode node's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from muser_decode.router import RoutePolicy
from muser_wire.errors import WireError
from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS

DEFAULT_PORT = 4949
DEFAULT_PRODUCER_PORT = 4950


class ConfigError(WireError):
    """A flag's value cannot be used. The message names the flag."""

    code = "config"


@dataclass(frozen=True)
class ProducerAddress:
    """Where a producer's control port is."""

    host: str
    control_port: int


@dataclass(frozen=True)
class DecodeConfig:
    """How to serve one model. Port 0 lets the system choose; `producer` None: every prompt stays local."""

    model: Path
    model_id: str
    chat_template: Path | None
    host: str
    port: int
    producer: ProducerAddress | None
    allow_unqualified: bool
    route: RoutePolicy
    dtype: str
    kv_element: ElementType
    packed: bool
    chunk_tokens: int
    max_queue: int
    drain_s: float
    ready_file: Path | None
    trace: Path | None
    log_level: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-decode serve`."""
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    parser.add_argument("--model-id", default="", help="name in the API; default: the file's name")
    parser.add_argument("--chat-template", type=Path, help="Jinja file to use instead of the checkpoint's template")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="TCP port of the HTTP endpoint; 0: any")
    parser.add_argument("--producer", default="", help="HOST:PORT of a producer's control port; empty: none")
    parser.add_argument(
        "--allow-unqualified", action="store_true", help="accept a producer with other weights of the same model"
    )
    parser.add_argument(
        "--route",
        choices=[policy.value for policy in RoutePolicy],
        default=RoutePolicy.AUTO.value,
        help="auto: the faster way by measured rates; remote: the producer whenever it is ready; local: never",
    )
    parser.add_argument("--dtype", choices=sorted(COMPUTE_ELEMENTS), default="bf16", help="compute type")
    parser.add_argument("--kv", choices=[e.value for e in ElementType], help="element type of keys and values")
    parser.add_argument(
        "--weights",
        choices=["auto", "packed", "dense"],
        default="auto",
        help="packed: quantised weights as stored; dense: expanded to the compute type; "
        "auto: packed with Metal, dense on a CPU, where that is faster",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the BLAS; 0: its own choice")
    parser.add_argument("--chunk-tokens", type=int, default=DEFAULT_CHUNK_TOKENS, help="the grid, in tokens")
    parser.add_argument("--max-queue", type=int, default=16, help="requests that may wait beside those that run")
    parser.add_argument("--drain-s", type=float, default=30.0, help="seconds that SIGTERM leaves to running requests")
    parser.add_argument("--ready-file", type=Path, help="written as JSON once the node serves")
    parser.add_argument("--trace", type=Path, help="append where the time of handoffs goes, as JSON lines")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def from_arguments(arguments: argparse.Namespace, *, packed_by_default: bool) -> DecodeConfig:
    """Return the configuration that parsed flags describe.

    Raises:
        ConfigError: a value cannot be used.
    """
    packed = packed_by_default if arguments.weights == "auto" else arguments.weights == "packed"
    return DecodeConfig(
        model=arguments.model,
        model_id=arguments.model_id or arguments.model.stem,
        chat_template=arguments.chat_template,
        host=arguments.host,
        port=arguments.port,
        producer=parse_producer(arguments.producer),
        allow_unqualified=arguments.allow_unqualified,
        route=RoutePolicy(arguments.route),
        dtype=arguments.dtype,
        kv_element=ElementType(arguments.kv) if arguments.kv else COMPUTE_ELEMENTS[arguments.dtype],
        packed=packed,
        chunk_tokens=arguments.chunk_tokens,
        max_queue=arguments.max_queue,
        drain_s=arguments.drain_s,
        ready_file=arguments.ready_file,
        trace=arguments.trace,
        log_level=arguments.log_level,
    )


def parse_producer(text: str) -> ProducerAddress | None:
    """Return the address in "HOST:PORT" or "HOST"; None for an empty text.

    Raises:
        ConfigError: the port is no number from 1 to 65535.
    """
    if not text:
        return None
    host, separator, port = text.rpartition(":")
    if not separator:
        return ProducerAddress(text, DEFAULT_PRODUCER_PORT)
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--producer {text}: {port!r} is not a port from 1 to 65535")
    return ProducerAddress(host.strip("[]"), int(port))
