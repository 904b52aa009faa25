"""Builds the decode node from its configuration and serves it until a signal."""

from __future__ import annotations

import argparse
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import uvicorn
from fastapi import FastAPI

from muser_decode.app import create_app
from muser_decode.client import Consumer, ProducerClient
from muser_decode.config import ConfigError, DecodeConfig, ProducerAddress, from_arguments
from muser_decode.engine.loop import STALL_S, Engine
from muser_decode.entrance import Entrance, open_entrance
from muser_decode.errors import HttpServerFailed
from muser_decode.keeper import Keeper
from muser_decode.keeping import CacheSizes, open_keeper
from muser_decode.lanes import CheckedDevice, check_device, computed, load_decoder
from muser_decode.metrics import Metrics, Now
from muser_decode.node import DecodeNode, ServedModel
from muser_decode.numerics import on_gpu
from muser_decode.observer import Observer
from muser_decode.producers import Producers
from muser_decode.router import RoutePolicy, Router
from muser_wire.geometry import Geometry
from muser_wire.home import muser_home
from muser_wire.logs import install as install_log
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.notify import Notifier, Watchdog, more_time_to_load
from muser_wire.pairing.trust import consumer_trust
from muser_wire.process import SignalFlag, reload_on_hangup, stop_on_signals, write_ready_file
from muser_wire.settings.reload import Changes, Reloader
from muser_wire.settings.settings import Settings
from muser_wire.trace import configure_trace
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcChannel
from muser_wire.transport.malloc import raise_malloc_thresholds
from muser_wire.transport.ports import port_taken
from muser_wire.upkeep import LOOK_S, Upkeep, set_log_level

ALIAS = "muser"
"""The name under which a client reaches whatever model is served."""

MEGABYTE = 1_000_000
BACKLOG = 128
KEEP_ALIVE_S = 30
START_LOOK_S = 0.02
"""How often the main thread looks whether the server has started, in seconds; after that it leaves others in peace."""

GRACE_S = 2.0
"""What uvicorn may take beyond the drain to close what is left, in seconds."""

_log = logging.getLogger(__name__)


def serve(values: argparse.Namespace, blas: str, settings: Settings) -> None:
    """Bind, load, serve until SIGTERM or SIGINT, drain. What cannot work is refused before a user waits.

    `values` are what `settings` said a moment ago.
    """
    config = from_arguments(values, on_gpu=on_gpu())
    notifier = Notifier()
    install_log(config.log_level, config.log_format)
    _log.info("blas name=%s", blas)
    raise_malloc_thresholds()
    if config.trace is not None:
        configure_trace(config.trace)
    entrance = open_entrance(config.access, muser_home(), time.time())
    listener = bind(config.host, config.port)
    links = links_to_producers(config)
    with more_time_to_load(notifier, f"loading {config.model.name}"):
        loaded = load(config)
    metrics = Metrics(loaded.served.identities, config.model_id, loaded.device.kernels)
    producers = make_producers(config, links, loaded.consumer, metrics)
    with open_keeper(cache_sizes(config), loaded.consumer, computed(config)) as keeper:
        engine = make_engine(config, loaded, keeper)
        node = DecodeNode(loaded.served, engine, producers, keeper, metrics)
        metrics.watch(present(engine, producers, keeper))
        app = create_app(node, chat_template=read_template(config), entrance=entrance, exposition=metrics.exposition)
        with more_time_to_load(notifier, f"loading {config.model.name}"):
            engine.start()
        # Until here a signal ends the process at once: nothing has been promised to anybody yet.
        stop = stop_on_signals()
        reload = Reloader(settings, values, changes(entrance), notifier)
        upkeep = Upkeep(Watchdog(notifier, lambda: engine.last_progress), reload_on_hangup(stop), reload)
        try:
            producers.start()
            run_http(HttpServer(app, listener, config, entrance, notifier), upkeep, stop)
        finally:
            engine.stop()
            producers.stop()
    _log.info("stopped")


def changes(entrance: Entrance) -> Changes:
    """Return what a running node takes in when its configuration is read again. Peers are read at each use anyway."""
    refresh: dict[str, Callable[[], None]] = {}
    keys, certificate = entrance.keys, entrance.certificate
    if keys is not None:
        refresh["api_keys"] = keys.reload
    if certificate is not None:
        refresh["http_certificate"] = lambda: certificate.reload(time.time())
    check = partial(from_arguments, on_gpu=on_gpu())
    return Changes(check=check, live={"log_level": set_log_level}, refresh=refresh)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as this node serves it."""

    checkpoint: Checkpoint
    device: CheckedDevice
    consumer: Consumer
    served: ServedModel


def load(config: DecodeConfig) -> Loaded:
    """Open the checkpoint and compute what this node is; the weights themselves are the engine's to load.

    Raises:
        CheckpointError: the files cannot be used, or not in this lane.
        NumericsMismatch: this node's device does not compute as the lane's rules say.
    """
    checkpoint, tokenizer = open_checkpoint(config.model), load_tokenizer(config.model)
    device = check_device(config, checkpoint)
    identities = node_identities(
        checkpoint,
        tokenizer,
        element=config.kv_element,
        lane=config.lane,
        chunk_tokens=config.chunk_tokens,
        conformance=device.conformance,
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
    consumer = Consumer(checkpoint.spec, identities, geometry, config.allow_unqualified)
    return Loaded(checkpoint, device, consumer, served)


def cache_sizes(config: DecodeConfig) -> CacheSizes:
    """Return how much of what was computed is kept, and where."""
    directory = config.cache_dir or muser_home() / "kvpack"
    memory_nbytes, disk_nbytes = config.cache_memory_mb * MEGABYTE, config.cache_disk_mb * MEGABYTE
    return CacheSizes(memory_nbytes, disk_nbytes, directory, config.reuse_decoded)


def make_engine(config: DecodeConfig, loaded: Loaded, keeper: Keeper | None) -> Engine:
    """Return the engine, not started; a staging slot holds one whole chunk."""
    geometry = loaded.consumer.geometry
    return Engine(
        lambda: load_decoder(config, loaded.checkpoint, loaded.device),
        chunk_tokens=config.chunk_tokens,
        max_batch=config.max_batch,
        max_queue=config.max_queue,
        memory_nbytes=config.memory_mb * MEGABYTE or None,
        deadline_s=config.deadline_s or None,
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
        PortTaken: the port is in use, or the address is none of this machine's; the message names it.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise port_taken("muser-decode", host, port, error) from error
    return listener


@dataclass(frozen=True)
class ProducerLink:
    """The way to a configured producer; `node_key` is a paired one's, None within this machine."""

    name: str
    channel: GrpcChannel
    node_key: bytes | None


def links_to_producers(config: DecodeConfig) -> list[ProducerLink]:
    """Return the ways to the configured producers; nothing is sent yet.

    Raises:
        PairingError: a producer is on another machine and not paired with this one; the message names it.
        WireError: one is, but cannot be used now: revoked, expired, or a clock is wrong.
    """
    return [] if config.route is RoutePolicy.LOCAL else [link_to(address) for address in config.producers]


def link_to(address: ProducerAddress) -> ProducerLink:
    """Return the way to one producer; see `links_to_producers`."""
    host, port = address.host, address.control_port
    if host in LOOPBACK_HOSTS:
        return ProducerLink(address.name, GrpcChannel(host, port), None)
    trust = consumer_trust(muser_home(), host, time.time)
    return ProducerLink(address.name, GrpcChannel(host, port, trust), trust.node_key())


def make_producers(
    config: DecodeConfig, links: list[ProducerLink], consumer: Consumer, observer: Observer
) -> Producers:
    """Return the producers and the router over them, not started."""
    clients = [ProducerClient(link.channel, consumer, link.node_key, link.name) for link in links]
    return Producers(Router(config.route), clients, consumer.geometry, config.chunk_tokens, observer)


def present(engine: Engine, producers: Producers, keeper: Keeper | None) -> Now:
    """Return what the metrics ask for whenever they are asked."""
    return Now(
        active=lambda: engine.load - engine.waiting,
        waiting=lambda: engine.waiting,
        producers=producers.describe,
        cache=None if keeper is None else keeper.store.stats,
        # Counted by mlx's allocator under a lock of its own: nothing is evaluated.
        device_nbytes=mx.get_active_memory,
    )


@dataclass(frozen=True)
class HttpServer:
    """What the HTTP port needs: the application, its socket, its flags, its entrance, whom to tell."""

    app: FastAPI
    listener: socket.socket
    config: DecodeConfig
    entrance: Entrance
    notifier: Notifier

    def make(self) -> uvicorn.Server:
        """Return the server, not started."""
        certificate = self.entrance.certificate
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(self.config.drain_s)),
            ssl_certfile=None if certificate is None else certificate.cert_file,
            ssl_keyfile=None if certificate is None else certificate.key_file,
        )
        config.load()
        if certificate is not None and config.ssl is not None:
            certificate.serve_latest(config.ssl)
        return uvicorn.Server(config)

    def announce(self) -> None:
        """Say that the node serves: in the log, to systemd, and in the ready file where one is wanted."""
        port = int(self.listener.getsockname()[1])
        scheme = "http" if self.entrance.certificate is None else "https"
        _log.info("serving url=%s", f"{scheme}://{self.config.host}:{port}")
        if self.config.ready_file is not None:
            write_ready_file(self.config.ready_file, {"port": port})
        self.notifier.ready(f"serving {self.config.model_id} on {self.config.host}:{port}")


def run_http(http: HttpServer, upkeep: Upkeep, stop: SignalFlag) -> None:
    """Serve until `stop` is set, then let requests under way finish for the configured seconds.

    Raises:
        HttpServerFailed: the server ended by itself.
    """
    server, drain_s = http.make(), http.config.drain_s
    # On a thread that is not the main one uvicorn leaves signals alone, so that a drained node exits with 0.
    thread = threading.Thread(target=server.run, args=([http.listener],), name="http", daemon=True)
    thread.start()
    announced, pause_s = False, START_LOOK_S
    while thread.is_alive() and not stop.wait(pause_s):
        upkeep.look()
        if server.started and not announced:
            announced, pause_s = True, LOOK_S
            http.announce()
    if not stop.is_set():
        raise HttpServerFailed("the HTTP server ended by itself; its log says why")
    _log.info("draining seconds=%.0f", drain_s)
    http.notifier.stopping(drain_s + GRACE_S + STALL_S, "draining")
    server.should_exit = True
    deadline = time.monotonic() + drain_s + GRACE_S
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(LOOK_S)
        upkeep.watchdog.look()
