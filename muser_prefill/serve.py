"""Builds the producer from its configuration and serves it until a signal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import time

import torch

from muser_prefill.config import PrefillConfig, from_arguments
from muser_prefill.engine.reuse import ComputedPrompts
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.errors import DeviceUnavailable
from muser_prefill.lanes import load
from muser_prefill.metrics import Metrics, Now, served
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.geometry import Geometry
from muser_wire.home import muser_home
from muser_wire.kvpack.naming import Namer, random_key
from muser_wire.kvpack.store import BlockStore
from muser_wire.logs import install as install_log
from muser_wire.messages import ID_NBYTES
from muser_wire.notify import Notifier, Watchdog, more_time_to_load
from muser_wire.pairing.certificates import fingerprint as node_fingerprint
from muser_wire.pairing.trust import Trust, producer_trust
from muser_wire.process import reload_on_hangup, stop_on_signals, write_ready_file
from muser_wire.settings.reload import Changes, Reloader
from muser_wire.settings.settings import Settings
from muser_wire.trace import configure_trace
from muser_wire.transport import discovery
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcServer
from muser_wire.transport.malloc import raise_malloc_thresholds
from muser_wire.upkeep import Upkeep, set_log_level

MEGABYTE = 1_000_000
LOOK_S = 0.05
CLOSE_S = 1.0
"""What streams whose last frame has left may take to be read, in seconds."""

STOP_S = 5.0
"""How long the compute thread may take to end after the last stream has."""

_log = logging.getLogger(__name__)


def serve(settings: Settings) -> None:
    """Bind, load, admit kernels, serve until a signal, drain.

    The ports are bound first: what cannot work is refused before minutes of loading.
    """
    values = settings.read().namespace()
    config = from_arguments(values)
    install_log(config.log_level, config.log_format)
    metrics = Metrics()
    with served(config.metrics_host, config.metrics_port, metrics) as ports:
        run(settings, values, config, metrics, ports)
    _log.info("stopped")


def run(
    settings: Settings, values: argparse.Namespace, config: PrefillConfig, metrics: Metrics, ports: dict[str, int]
) -> None:
    """See `serve`. `ports` go into the ready file beside this function's own."""
    notifier = Notifier()
    raise_malloc_thresholds()
    if config.trace is not None:
        configure_trace(config.trace)
    if config.threads:
        torch.set_num_threads(config.threads)
    trust = None if config.host in LOOPBACK_HOSTS else producer_trust(muser_home(), config.host, time.time)
    server = GrpcServer(config.host, config.control_port, config.data_port, trust)
    with more_time_to_load(notifier, f"loading {config.model.name}"):
        service, scheduler = build(config, server.data_port, metrics, trust)
        scheduler.start()
    # Until here a signal ends the process at once: nothing has been promised to anybody yet.
    stop = stop_on_signals()
    reload = Reloader(settings, values, changes(service, trust), notifier)
    upkeep = Upkeep(Watchdog(notifier, lambda: scheduler.last_progress), reload_on_hangup(stop), reload)
    server.start(service)
    server.set_serving(True)
    _log.info("serving host=%s control_port=%d data_port=%d", config.host, server.control_port, server.data_port)
    if config.ready_file is not None:
        facts: dict[str, object] = {"control_port": server.control_port, "data_port": server.data_port, **ports}
        write_ready_file(config.ready_file, facts)
    notifier.ready(f"serving {config.model.name} on {config.host}:{server.control_port}")
    with announcement(config, server.control_port):
        upkeep.until(stop)
    _log.info("draining seconds=%.0f", config.drain_s)
    notifier.stopping(config.drain_s + CLOSE_S + STOP_S, "draining")
    drain(config.drain_s, service, server, upkeep.watchdog)
    scheduler.stop(STOP_S)


def announcement(config: PrefillConfig, control_port: int) -> contextlib.AbstractContextManager[None]:
    """Return what says on the local link that this producer is there, while it is; nothing where that is not wanted."""
    if not config.announce:
        return contextlib.nullcontext()
    fingerprint = NodeKey.load_or_create(muser_home() / "keys" / "prefill.ed25519").public_bytes
    return discovery.announced(
        discovery.Kind.PRODUCER,
        socket.gethostname(),
        (config.host, control_port),
        node_fingerprint(fingerprint),
    )


def changes(service: ProducerService, trust: Trust | None) -> Changes:
    """Return what a running producer takes in when its configuration is read again."""

    def look_at_peers() -> None:
        # The store is read at each call anyway; here it is said what it holds now.
        if trust is not None:
            _log.info("peers_trusted certificates=%d", len(trust.material().trusted_pem))

    return Changes(
        check=from_arguments,
        live={"log_level": set_log_level, "max_rate": lambda rate: service.set_max_rate(float(str(rate)))},
        refresh={"peers": look_at_peers},
    )


def drain(seconds: float, service: ProducerService, server: GrpcServer, watchdog: Watchdog) -> None:
    """Refuse new handoffs by name while those accepted go on, for at most `seconds`; then close both ports."""
    service.drain()
    server.set_serving(False)
    deadline = time.monotonic() + seconds
    while service.under_way and time.monotonic() < deadline:
        watchdog.look()
        time.sleep(LOOK_S)
    server.stop(CLOSE_S)


def build(
    config: PrefillConfig, data_port: int, metrics: Metrics, trust: Trust | None = None
) -> tuple[ProducerService, Scheduler]:
    """Return the service of a configuration and the scheduler that it uses, which is not started yet."""
    device = choose_device(config.device)
    loaded = load(config, device)
    decoder, identities = loaded.decoder, loaded.identities
    facts = ProducerFacts(
        spec=decoder.spec,
        identities=identities,
        geometry=Geometry.of(decoder.spec, config.kv_element),
        kernels=decoder.admitted,
        data_port=data_port,
        incarnation=os.urandom(ID_NBYTES),
        cache_nbytes=config.cache_memory_mb * MEGABYTE,
    )
    node_key = NodeKey.load_or_create(muser_home() / "keys" / "prefill.ed25519")
    store = kept_prompts(config, facts)
    computed = None if store is None else ComputedPrompts(store)
    scheduler = Scheduler(decoder, config.chunk_tokens, config.max_waiting, computed, metrics)
    metrics.describe(identities, config.model.name, decoder.admitted, present(scheduler, store, device))
    check_peer = _nobody_to_check if trust is None else trust.check_peer
    service = ProducerService(
        facts, node_key, scheduler, max_rate=config.max_rate, check_peer=check_peer, observer=metrics
    )
    return service, scheduler


def present(scheduler: Scheduler, store: BlockStore | None, device: torch.device) -> Now:
    """Return what the metrics ask for whenever they are asked."""
    return Now(
        unfinished=lambda: scheduler.load,
        wait_s=lambda: scheduler.predicted_wait_ns() / 1e9,
        seconds_per_chunk=lambda: scheduler.predicted_chunk_ns() / 1e9,
        cache=None if store is None else store.stats,
        device_nbytes=lambda: torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
    )


def kept_prompts(config: PrefillConfig, facts: ProducerFacts) -> BlockStore | None:
    """Return where computed prompts are kept, if the configuration gives it memory."""
    if config.cache_memory_mb <= 0:
        return None
    namer = Namer(random_key(), facts.identities)
    return BlockStore(namer, facts.geometry, config.cache_memory_mb * MEGABYTE)


def _nobody_to_check(fingerprint: str) -> None:
    """Within one machine there are no peers."""


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is CUDA where torch has it.

    Raises:
        DeviceUnavailable: torch does not know the name, or this machine lacks the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise DeviceUnavailable(f"--device {name} cannot be used: {reason}") from error
    return device
