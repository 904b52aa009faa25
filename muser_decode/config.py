"""The decode node's configuration: plain values with units, read once from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from muser_decode import access
from muser_decode.router import RoutePolicy
from muser_wire.cli.node import add_process, node_parser
from muser_wire.errors import NumericsMismatch, WireError
from muser_wire.flags import port, seconds, whole
from muser_wire.geometry import COMPUTE_ELEMENTS, ElementType
from muser_wire.numerics import Lane, check_element, speculation_allowed
from muser_wire.schedule import DEFAULT_CHUNK_TOKENS, MAX_CHUNK_TOKENS

DEFAULT_PORT = 4949
DEFAULT_PRODUCER_PORT = 4950
MAX_THREADS = 1024
MAX_QUEUE = 1000
MAX_BATCH = 64
"""So many rows of a step are each what they are alone; see `muser_decode.alike.FEW_ROWS`."""

MAX_CACHE_MB = 1_000_000_000

DEFAULT_CACHE_MEMORY_MB = 1024
"""A few long chats of a large model. Memory is taken as prompts come, not at the start."""

REUSE_DECODED = {"yes": True, "no": False}


class ConfigError(WireError):
    """A flag's value cannot be used. The message names the flag."""

    code = "config"


@dataclass(frozen=True)
class ProducerAddress:
    """Where a producer's control port is."""

    host: str
    control_port: int

    @property
    def name(self) -> str:
        """What logs, metrics and answers call the producer: HOST:PORT."""
        return f"[{self.host}]:{self.control_port}" if ":" in self.host else f"{self.host}:{self.control_port}"


@dataclass(frozen=True)
class DecodeConfig:
    """How to serve one model. Port 0 lets the system choose; without producers every prompt stays local.

    A memory of 0 MB is what the machine has, a deadline of 0 none. A cache of 0 MB is none; its directory None is
    the one in MUSER_HOME. `dtype` None: the reference lane, which computes with integers.
    """

    model: Path
    model_id: str
    chat_template: Path | None
    host: str
    port: int
    access: access.AccessConfig
    producers: tuple[ProducerAddress, ...]
    allow_unqualified: bool
    route: RoutePolicy
    lane: Lane
    dtype: str | None
    kv_element: ElementType
    packed: bool
    chunk_tokens: int
    max_batch: int
    max_queue: int
    memory_mb: int
    deadline_s: float
    drain_s: float
    cache_memory_mb: int
    cache_disk_mb: int
    cache_dir: Path | None
    reuse_decoded: bool
    ready_file: Path | None
    trace: Path | None
    log_level: str
    log_format: str


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command. Parsed, `keys` are the keys of the configuration."""
    check = partial(from_arguments, on_gpu=False)
    return node_parser("decode", "Muser's decode node: an OpenAI-compatible chat", add_arguments, check)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `muser-decode serve`. Each is a key of the configuration file too, its group the table."""
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    access.add_arguments(parser.add_argument_group("access"))
    _add_requests(parser.add_argument_group("requests"))
    _add_sizes(parser.add_argument_group("sizes"))
    _add_cache(parser.add_argument_group("cache"))
    add_process(parser.add_argument_group("process"), "requests")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, required=True, help="GGUF file or directory of a checkpoint")
    group.add_argument("--model-id", default="", help="name in the API; default: the file's name")
    group.add_argument("--chat-template", type=Path, help="Jinja file to use instead of the checkpoint's template")
    group.add_argument(
        "--lane",
        choices=[lane.value for lane in Lane],
        default=Lane.NATIVE.value,
        help="native: this node's fastest arithmetic; reference: the same bytes on every machine",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", *COMPUTE_ELEMENTS],
        default="auto",
        help="compute type of the native lane; auto: bf16 with Metal, f32 on a CPU",
    )
    group.add_argument(
        "--kv", choices=[e.value for e in ElementType], help="element type of keys and values; reference lane: f16"
    )
    group.add_argument(
        "--weights",
        choices=["auto", "packed", "dense"],
        default="auto",
        help="of the native lane; packed: quantised weights as stored; dense: expanded to the compute type; "
        "auto: packed with Metal unless the compute type is bf16, dense on a CPU, where that is faster",
    )
    group.add_argument("--drafter", type=Path, help="checkpoint that drafts tokens; refused: no lane has one yet")


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to bind; one that is not loopback needs keys and TLS"
    )
    group.add_argument("--port", type=port, default=DEFAULT_PORT, help="TCP port of the HTTP endpoint; 0: any")
    group.add_argument(
        "--producer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a producer's control port; may be given several times: each prompt goes to the one expected to be first",
    )
    group.add_argument(
        "--allow-unqualified",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="accept a producer with other weights of the same model",
    )
    group.add_argument(
        "--route",
        choices=[policy.value for policy in RoutePolicy],
        default=RoutePolicy.AUTO.value,
        help="auto: the faster way by measured rates; remote: a producer whenever one is ready; local: never",
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


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cache-memory-mb",
        type=whole(0, MAX_CACHE_MB),
        default=DEFAULT_CACHE_MEMORY_MB,
        help="memory for computed prompts, in MB (default: %(default)s); 0: none are kept there",
    )
    group.add_argument(
        "--cache-disk-mb",
        type=whole(0, MAX_CACHE_MB),
        default=0,
        help="disk for computed prompts, over restarts, in MB; 0: none",
    )
    group.add_argument(
        "--reuse-decoded",
        choices=list(REUSE_DECODED),
        default="yes",
        help="yes: an answer that decode produced is reused on the next turn, and the response says so; "
        "no: the prompt is prefilled again from where the answer began",
    )
    group.add_argument("--cache-dir", type=Path, help="where those on disk lie; default: kvpack in MUSER_HOME")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-batch",
        type=whole(1, MAX_BATCH),
        default=8,
        help="requests that are answered at once (default: %(default)s); each takes its share of --memory-mb",
    )
    group.add_argument(
        "--memory-mb",
        type=whole(0, MAX_CACHE_MB),
        default=0,
        help="memory for the keys and values of running requests and, within it, of --cache-memory-mb, in MB; "
        "0: what the machine has beside the model, less an eighth",
    )
    group.add_argument(
        "--deadline-s",
        type=seconds,
        default=0.0,
        help="seconds after which a request ends, finished or not; a body's deadline_s may be shorter; 0: never",
    )


def from_arguments(arguments: argparse.Namespace, *, on_gpu: bool) -> DecodeConfig:
    """Return the configuration that parsed flags describe; `on_gpu` decides what "auto" means.

    Raises:
        ConfigError: a value cannot be used.
        NumericsMismatch: the lane does not have what was asked for.
    """
    lane = Lane(arguments.lane)
    if arguments.drafter is not None:
        speculation_allowed(lane)
    dtype, packed, element = arithmetic(arguments, lane, on_gpu=on_gpu)
    return DecodeConfig(
        model=arguments.model,
        model_id=arguments.model_id or arguments.model.stem,
        chat_template=arguments.chat_template,
        host=arguments.host,
        port=arguments.port,
        access=access.from_arguments(arguments),
        producers=parse_producers(arguments.producer),
        allow_unqualified=arguments.allow_unqualified,
        route=RoutePolicy(arguments.route),
        lane=lane,
        dtype=dtype,
        kv_element=element,
        packed=packed,
        chunk_tokens=arguments.chunk_tokens,
        max_batch=arguments.max_batch,
        max_queue=arguments.max_queue,
        memory_mb=arguments.memory_mb,
        deadline_s=arguments.deadline_s,
        drain_s=arguments.drain_s,
        cache_memory_mb=arguments.cache_memory_mb,
        cache_disk_mb=arguments.cache_disk_mb,
        cache_dir=arguments.cache_dir,
        reuse_decoded=REUSE_DECODED[arguments.reuse_decoded],
        ready_file=arguments.ready_file,
        trace=arguments.trace,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
    )


def arithmetic(arguments: argparse.Namespace, lane: Lane, *, on_gpu: bool) -> tuple[str | None, bool, ElementType]:
    """Return a lane's compute type, whether weights stay packed, and the element type of keys and values.

    Raises:
        NumericsMismatch: flags ask for what the lane does not have.
    """
    if lane is Lane.REFERENCE:
        for flag, value in (("--dtype", arguments.dtype), ("--weights", arguments.weights)):
            if value != "auto":
                raise NumericsMismatch(
                    f"{flag} {value} is of the native lane; the reference lane computes with integers"
                )
        element = ElementType(arguments.kv) if arguments.kv else ElementType.F16
        check_element(lane, element)
        return None, True, element
    dtype = ("bf16" if on_gpu else "f32") if arguments.dtype == "auto" else arguments.dtype
    # Packed weights are the faster ones on a GPU, but bf16 would round their scales.
    packed = (on_gpu and dtype != "bf16") if arguments.weights == "auto" else arguments.weights == "packed"
    return dtype, packed, ElementType(arguments.kv) if arguments.kv else COMPUTE_ELEMENTS[dtype]


def parse_producers(texts: Sequence[str]) -> tuple[ProducerAddress, ...]:
    """Return the addresses in several texts; empty ones name none.

    Raises:
        ConfigError: one is no address, or two are the same.
    """
    addresses: list[ProducerAddress] = []
    for text in texts:
        address = parse_producer(text)
        if address in addresses:
            raise ConfigError(f"--producer {text}: this producer is named twice")
        addresses += [address] if address is not None else []
    return tuple(addresses)


def parse_producer(text: str) -> ProducerAddress | None:
    """Return the address in "HOST:PORT" or "HOST"; None for an empty text.

    Raises:
        ConfigError: the port is no number from 1 to 65535.
    """
    if not text:
        return None
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        return ProducerAddress(text.strip("[]"), DEFAULT_PRODUCER_PORT)
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--producer {text}: {port!r} is not a port from 1 to 65535")
    return ProducerAddress(host.strip("[]"), int(port))
