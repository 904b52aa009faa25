"""`muser-prefill`: the producer's command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import torch

from muser_prefill.config import PrefillConfig, add_arguments, from_arguments
from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.reuse import ComputedPrompts
from muser_prefill.engine.scheduler import Scheduler
from muser_prefill.errors import DeviceUnavailable, PrefillError
from muser_prefill.numerics import compute_dtype
from muser_prefill.service import ProducerFacts, ProducerService
from muser_wire.auth import NodeKey
from muser_wire.errors import WireError
from muser_wire.geometry import Geometry
from muser_wire.home import muser_home
from muser_wire.kvpack.naming import Namer, random_key
from muser_wire.kvpack.store import BlockStore
from muser_wire.messages import ID_NBYTES
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.pairing.trust import Trust, producer_trust
from muser_wire.process import configure_logging, stop_on_signals, write_ready_file
from muser_wire.trace import configure_trace
from muser_wire.transport.grpc import LOOPBACK_HOSTS, GrpcServer
from muser_wire.transport.malloc import raise_malloc_thresholds

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
MEGABYTE = 1_000_000
LOOK_S = 0.05
CLOSE_S = 1.0
"""What streams whose last frame was computed may take to be read, in seconds."""

STOP_S = 5.0
"""How long the compute thread may take to end after the last stream has."""

_log = logging.getLogger("muser_prefill")  # __name__ is "__main__" here


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="muser-prefill", description="Muser's producer: prefills and streams KV")
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("serve", help="serve one model until SIGTERM"))
    config = from_arguments(parser.parse_args(argv))
    configure_logging(config.log_level)
    try:
        serve(config)
    except (WireError, PrefillError) as error:
        print(f"muser-prefill: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def serve(config: PrefillConfig) -> None:
    """Bind, load, admit kernels, serve until a signal, drain.

    The ports are bound first: what cannot work is refused before minutes of loading.
    """
    raise_malloc_thresholds()
    if config.trace is not None:
        configure_trace(config.trace)
    if config.threads:
        torch.set_num_threads(config.threads)
    trust = None if config.host in LOOPBACK_HOSTS else producer_trust(muser_home(), config.host, time.time)
    server = GrpcServer(config.host, config.control_port, config.data_port, trust)
    service, scheduler = build(config, server.data_port, trust)
    scheduler.start()
    # Until here a signal ends the process at once: nothing has been promised to anybody yet.
    stop = stop_on_signals()
    server.start(service)
    server.set_serving(True)
    _log.info("serving host=%s control_port=%d data_port=%d", config.host, server.control_port, server.data_port)
    if config.ready_file is not None:
        write_ready_file(config.ready_file, {"control_port": server.control_port, "data_port": server.data_port})
    stop.wait()
    _log.info("draining seconds=%.0f", config.drain_s)
    drain(config.drain_s, service, scheduler, server)
    scheduler.stop(STOP_S)
    _log.info("stopped")


def drain(seconds: float, service: ProducerService, scheduler: Scheduler, server: GrpcServer) -> None:
    """Refuse new handoffs by name while those accepted go on, for at most `seconds`; then close both ports."""
    service.drain()
    server.set_serving(False)
    deadline = time.monotonic() + seconds
    while scheduler.load and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    server.stop(CLOSE_S)


def build(config: PrefillConfig, data_port: int, trust: Trust | None = None) -> tuple[ProducerService, Scheduler]:
    """Return the service of a configuration and the scheduler that it uses, which is not started yet."""
    device = choose_device(config.device)
    checkpoint = open_checkpoint(config.model)
    tokenizer = load_tokenizer(config.model)
    identities = node_identities(
        checkpoint, tokenizer, element=config.kv_element, lane=Lane.NATIVE, chunk_tokens=config.chunk_tokens
    )
    decoder = TorchDecoder(checkpoint, dtype=compute_dtype(config.dtype), kv_element=config.kv_element, device=device)
    _log.info(
        "loaded model=%s encoding=%s dtype=%s device=%s kernels=%s",
        config.model.name,
        checkpoint.encoding,
        config.dtype,
        device,
        ",".join(decoder.admitted),
    )
    facts = ProducerFacts(
        spec=checkpoint.spec,
        identities=identities,
        geometry=Geometry.of(checkpoint.spec, config.kv_element),
        kernels=decoder.admitted,
        data_port=data_port,
        incarnation=os.urandom(ID_NBYTES),
    )
    node_key = NodeKey.load_or_create(muser_home() / "keys" / "prefill.ed25519")
    scheduler = Scheduler(decoder, config.chunk_tokens, config.max_waiting, computed_prompts(config, facts))
    check_peer = _nobody_to_check if trust is None else trust.check_peer
    service = ProducerService(facts, node_key, scheduler, max_rate=config.max_rate, check_peer=check_peer)
    return service, scheduler


def computed_prompts(config: PrefillConfig, facts: ProducerFacts) -> ComputedPrompts | None:
    """Return what keeps computed prompts, if the configuration gives it memory."""
    if config.cache_memory_mb <= 0:
        return None
    namer = Namer(random_key(), facts.identities)
    return ComputedPrompts(BlockStore(namer, facts.geometry, config.cache_memory_mb * MEGABYTE))


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


if __name__ == "__main__":
    sys.exit(main())
