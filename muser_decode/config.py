"""The decode node's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from muser_decode.router import RoutePolicy
from muser_wire.errors import WireError
from muser_wire.flags import new_file, port, seconds, whole
from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, MAX_CHUNK_TOKENS

DEFAULT_PORT = 4949
DEFAULT_PRODUCER_PORT = 4950
MAX_THREADS = 1024
MAX_QUEUE = 1000
MAX_CACHE_MB = 1_000_000_000


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
    """How to serve one model. Port 0 lets the system choose; `producer` None: every prompt stays local.

    A cache of 0 MB is none; its directory None is the one in MUSER_HOME.
    """

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
    cache_memory_mb: int
    cache_disk_mb: int
    cache_dir: Path | None
    ready_file: Path | None
    trace: Path | None
    log_level: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-decode serve`."""
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_sizes(parser.add_argument_group("sizes"))
    _add_process(parser.add_argument_group("process"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    group.add_argument("--model-id", default="", help="name in the API; default: the file's name")
    group.add_argument("--chat-template", type=Path, help="Jinja file to use instead of the checkpoint's template")
    group.add_argument(
        "--dtype",
        choices=["auto", *COMPUTE_ELEMENTS],
        default="auto",
        help="compute type; auto: bf16 with Metal, f32 on a CPU",
    )
    group.add_argument("--kv", choices=[e.value for e in ElementType], help="element type of keys and values")
    group.add_argument(
        "--weights",
        choices=["auto", "packed", "dense"],
        default="auto",
        help="packed: quantised weights as stored; dense: expanded to the compute type; "
        "auto: packed with Metal unless the compute type is bf16, dense on a CPU, where that is faster",
    )


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="loopback address to bind")
    group.add_argument("--port", type=port, default=DEFAULT_PORT, help="TCP port of the HTTP endpoint; 0: any")
    group.add_argument("--producer", default="", help="HOST:PORT of a producer's control port; empty: none")
    group.add_argument(
        "--allow-unqualified", action="store_true", help="accept a producer with other weights of the same model"
    )
    group.add_argument(
        "--route",
        choices=[policy.value for policy in RoutePolicy],
        default=RoutePolicy.AUTO.value,
        help="auto: the faster way by measured rates; remote: the producer whenever it is ready; local: never",
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--threads", type=whole(0, MAX_THREADS), default=0, help="CPU threads of the BLAS; 0: its own choice"
    )
    group.add_argument(
        "--chunk-tokens", type=whole(1, MAX_CHUNK_TOKENS), default=DEFAULT_CHUNK_TOKENS, help="the grid, in tokens"
    )
    group.add_argument(
        "--max-queue", type=whole(0, MAX_QUEUE), default=16, help="requests that may wait beside those that run"
    )
    group.add_argument(
        "--cache-memory-mb",
        type=whole(0, MAX_CACHE_MB),
        default=0,
        help="memory for computed prompts, in MB; 0: none are kept",
    )
    group.add_argument(
        "--cache-disk-mb",
        type=whole(0, MAX_CACHE_MB),
        default=0,
        help="disk for computed prompts, over restarts, in MB; 0: none",
    )
    group.add_argument("--cache-dir", type=Path, help="where those on disk lie; default: kvpack in MUSER_HOME")


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--drain-s", type=seconds, default=30.0, help="seconds that SIGTERM leaves to running requests")
    group.add_argument("--ready-file", type=new_file, help="written as JSON once the node serves")
    group.add_argument("--trace", type=new_file, help="append where the time of handoffs goes, as JSON lines")
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")


def from_arguments(arguments: argparse.Namespace, *, on_gpu: bool) -> DecodeConfig:
    """Return the configuration that parsed flags describe; `on_gpu` decides what "auto" means.

    Raises:
        ConfigError: a value cannot be used.
    """
    dtype = ("bf16" if on_gpu else "f32") if arguments.dtype == "auto" else arguments.dtype
    # Packed weights are the faster ones on a GPU, but bf16 would round their scales.
    packed = (on_gpu and dtype != "bf16") if arguments.weights == "auto" else arguments.weights == "packed"
    return DecodeConfig(
        model=arguments.model,
        model_id=arguments.model_id or arguments.model.stem,
        chat_template=arguments.chat_template,
        host=arguments.host,
        port=arguments.port,
        producer=parse_producer(arguments.producer),
        allow_unqualified=arguments.allow_unqualified,
        route=RoutePolicy(arguments.route),
        dtype=dtype,
        kv_element=ElementType(arguments.kv) if arguments.kv else COMPUTE_ELEMENTS[dtype],
        packed=packed,
        chunk_tokens=arguments.chunk_tokens,
        max_queue=arguments.max_queue,
        drain_s=arguments.drain_s,
        cache_memory_mb=arguments.cache_memory_mb,
        cache_disk_mb=arguments.cache_disk_mb,
        cache_dir=arguments.cache_dir,
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
