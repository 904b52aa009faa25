"""Builds the decode node from its configuration and serves it until a signal."""

from __future__ import annotations

import argparse
import logging
import socket
import threading
import time
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from muser_decode.app import create_app
from muser_decode.client import Consumer, ProducerClient
from muser_decode.config import ConfigError, DecodeConfig, from_arguments
from muser_decode.decoder import MlxDecoder
from muser_decode.engine.loop import Engine
from muser_decode.errors import HttpServerFailed
from muser_decode.keeper import Keeper
from muser_decode.keeping import CacheSizes, open_keeper
from muser_decode.node import DecodeNode, ServedModel
from muser_decode.numerics import DTYPES, on_gpu
from muser_decode.router import RoutePolicy, Router
from muser_wire.geometry import Geometry
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.pairing.trust import consumer_trust
from muser_wire.process import configure_logging, stop_on_signals, write_ready_file
from muser_wire.trace import configure_trace
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel, PortTaken
from muser_wire.transport.malloc import raise_malloc_thresholds

ALIAS = "muser"
"""The name under which a client reaches whatever model is served."""

MEGABYTE = 1_000_000
BACKLOG = 128
KEEP_ALIVE_S = 30
LOOK_S = 0.02
"""How often the main thread looks whether the server has started or ended, in seconds."""

GRACE_S = 2.0
"""What uvicorn may take beyond the drain to close what is left, in seconds."""

_log = logging.getLogger(__name__)


def serve(arguments: argparse.Namespace, blas: str) -> None:
    """Bind, load, serve until SIGTERM or SIGINT, drain. What cannot work is refused before a user waits."""
    config = from_arguments(arguments, on_gpu=on_gpu())
    configure_logging(config.log_level)
    _log.info("blas %s", blas)
    raise_malloc_thresholds()
    if config.trace is not None:
        configure_trace(config.trace)
    listener = bind(config.host, config.port)
    link = link_to_producer(config)
    loaded = load(config)
    client = None if link is None else ProducerClient(link.channel, loaded.consumer, link.node_key)
    computed = f"{config.dtype} {'packed' if config.packed else 'dense'}"
    with open_keeper(cache_sizes(config), loaded.consumer, computed) as keeper:
        engine = make_engine(config, loaded, keeper)
        node = DecodeNode(loaded.served, engine, Router(config.route), client, keeper)
        app = create_app(node, chat_template=read_template(config))
        engine.start()
        # Until here a signal ends the process at once: nothing has been promised to anybody yet.
        stop = stop_on_signals()
        try:
            if client is not None:
                client.start()
            run_http(app, listener, config, stop)
        finally:
            engine.stop()
            if client is not None:
                client.stop()
    _log.info("stopped")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as this node serves it."""

    checkpoint: Checkpoint
    consumer: Consumer
    served: ServedModel


def load(config: DecodeConfig) -> Loaded:
    """Open the checkpoint and compute what this node is; the weights themselves are the engine's to load.

    Raises:
        CheckpointError: the files cannot be used.
    """
    checkpoint, tokenizer = open_checkpoint(config.model), load_tokenizer(config.model)
    identities = node_identities(
        checkpoint, tokenizer, element=config.kv_element, lane=Lane.NATIVE, chunk_tokens=config.chunk_tokens
    )
    served = ServedModel(
        model_id=config.model_id,
        aliases=frozenset({ALIAS}),
        tokenizer=tokenizer,
        context_tokens=checkpoint.spec.max_positions,
        created=int(time.time()),
        identities=identities,
    )
    geometry = Geometry.of(checkpoint.spec, config.kv_element)
    return Loaded(checkpoint, Consumer(checkpoint.spec, identities, geometry, config.allow_unqualified), served)


def cache_sizes(config: DecodeConfig) -> CacheSizes:
    """Return how much of what was computed is kept, and where."""
    directory = config.cache_dir or muser_home() / "kvpack"
    return CacheSizes(config.cache_memory_mb * MEGABYTE, config.cache_disk_mb * MEGABYTE, directory)


def make_engine(config: DecodeConfig, loaded: Loaded, keeper: Keeper | None) -> Engine:
    """Return the engine, not started; a staging slot holds one whole chunk."""
    geometry = loaded.consumer.geometry
    return Engine(
        lambda: load_decoder(config, loaded.checkpoint),
        chunk_tokens=config.chunk_tokens,
        max_queue=config.max_queue,
        staging_nbytes=geometry.layer_token_nbytes * len(geometry.windows) * config.chunk_tokens,
        keeper=keeper,
    )


def read_template(config: DecodeConfig) -> str | None:
    """Return the configured chat template's text; None leaves the checkpoint's own.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.chat_template is None:
        return None
    try:
        return config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: {error}") from error


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the system choose. Clients that come early wait for the node to load.

    Raises:
        ConfigError: `host` is not a loopback address.
        PortTaken: the port is in use; the message names it.
    """
    if host not in LOOPBACK_HOSTS:
        raise ConfigError(f"--host {host} is not a loopback address; the endpoint has no authentication yet")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"port {port} on {host} cannot be bound ({error.strerror}): another process, perhaps a muser-decode that "
            f"still runs, holds it (see: ss -ltnp 'sport = :{port}')"
        ) from error
    return listener


@dataclass(frozen=True)
class ProducerLink:
    """The way to the configured producer; `node_key` is a paired one's, None within this machine."""

    channel: GrpcChannel
    node_key: bytes | None


def link_to_producer(config: DecodeConfig) -> ProducerLink | None:
    """Return the way to the configured producer; nothing is sent yet.

    Raises:
        PairingError: the producer is on another machine and not paired with this one; the message names it.
        WireError: it is, but cannot be used now: revoked, expired, or a clock is wrong.
    """
    if config.producer is None or config.route is RoutePolicy.LOCAL:
        return None
    host, port = config.producer.host, config.producer.control_port
    if host in LOOPBACK_HOSTS:
        return ProducerLink(GrpcChannel(host, port), None)
    trust = consumer_trust(muser_home(), host, time.time)
    return ProducerLink(GrpcChannel(host, port, trust), trust.node_key())


def load_decoder(config: DecodeConfig, checkpoint: Checkpoint) -> MlxDecoder:
    """Return the decoder; called on the engine's thread, which owns mlx from then on."""
    started = time.monotonic()
    decoder = MlxDecoder(checkpoint, dtype=DTYPES[config.dtype], kv_element=config.kv_element, packed=config.packed)
    _log.info(
        "loaded model=%s encoding=%s dtype=%s packed=%s seconds=%.1f",
        config.model.name,
        checkpoint.encoding,
        config.dtype,
        config.packed,
        time.monotonic() - started,
    )
    return decoder


def run_http(app: FastAPI, listener: socket.socket, config: DecodeConfig, stop: threading.Event) -> None:
    """Serve until `stop` is set, then let requests under way finish for `drain_s` seconds.

    Raises:
        HttpServerFailed: the server ended by itself.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(config.drain_s)),
        )
    )
    # On a thread that is not the main one uvicorn leaves signals alone, so that a drained node exits with 0.
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    announced = False
    while thread.is_alive() and not stop.wait(LOOK_S):
        if server.started and not announced:
            announced = True
            announce(config, int(listener.getsockname()[1]))
    if not stop.is_set():
        raise HttpServerFailed("the HTTP server ended by itself; its log says why")
    _log.info("draining seconds=%.0f", config.drain_s)
    server.should_exit = True
    thread.join(config.drain_s + GRACE_S)


def announce(config: DecodeConfig, port: int) -> None:
    """Say that the node serves: in the log, and in the ready file where one is wanted."""
    _log.info("serving url=http://%s:%d", config.host, port)
    if config.ready_file is not None:
        write_ready_file(config.ready_file, {"port": port})
