"""Both nodes as a service manager sees them: ready, alive, reloaded, drained. Real processes, a real notify socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from notify_listener import Listener

from muser_decode.client import Consumer, ProducerClient
from muser_wire.errors import HandoffRefused, WireError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import Lane
from muser_wire.schedule import Segment
from muser_wire.transport.grpc import GrpcChannel

START_S = 90.0
WATCHDOG_S = 4.0
"""Above the idle heartbeat of both engines, of 1 s."""

GRID = 64
PORTS = {"muser_prefill": ["--control-port", "0", "--data-port", "0"], "muser_decode": ["--port", "0"]}
NODES = pytest.mark.parametrize("module", ["muser_prefill", "muser_decode"])

# A node whose decoder hangs in its next chunk, as a lost device does, once the file is there.
HANGING = """
import os, sys, threading
module, flag = sys.argv.pop(1), sys.argv.pop(1)
if module == "muser_decode":
    from muser_decode.blas import load_blas
    load_blas()
    from muser_decode.decoder import MlxDecoder as Decoder
    from muser_decode.__main__ import main
else:
    from muser_prefill.decoder import TorchDecoder as Decoder
    from muser_prefill.__main__ import main
real = Decoder.prefill_chunk
def prefill_chunk(self, *arguments, **named):
    if os.path.exists(flag):
        threading.Event().wait()
    return real(self, *arguments, **named)
Decoder.prefill_chunk = prefill_chunk
sys.exit(main())
"""


@dataclass
class Node:
    """One node's process, what it told so far, and its log."""

    process: subprocess.Popen[bytes]
    listener: Listener
    ready_file: Path
    log_file: Path

    @property
    def ports(self) -> dict[str, int]:
        return dict(json.loads(self.ready_file.read_text()))

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def ready(self) -> dict[str, str]:
        """Wait for READY; a node that has ended will not tell it."""

        def wanted(message: dict[str, str]) -> bool:
            return "READY" in message

        for _ in range(int(START_S)):
            with contextlib.suppress(AssertionError):
                return self.listener.until(wanted, 1.0)
            assert self.process.poll() is None, self.log
        raise AssertionError(self.log)


Start = Callable[..., Node]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def start(tmp_path: Path, home: Path, tiny_llama: Path) -> Iterator[Start]:
    """A function that starts a node on the tiny model; `hang` is the file that makes it hang."""
    with contextlib.ExitStack() as cleanup:

        def start(module: str, *flags: str, hang: Path | None = None, watchdog_s: float = WATCHDOG_S) -> Node:
            listener = Listener(tmp_path / "notify", watchdog_s)
            cleanup.callback(listener.close)
            ready_file, log_file = tmp_path / "ready.json", tmp_path / "log"
            program = ["-m", module] if hang is None else ["-c", HANGING, module, str(hang)]
            numerics = ["--model", str(tiny_llama), "--dtype", "f32", "--kv", "f16", "--threads", "1"]
            grid = ["--chunk-tokens", str(GRID), *PORTS[module], "--ready-file", str(ready_file)]
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, *program, "serve", *numerics, *grid, *flags],
                    stderr=log,
                    env=os.environ | listener.environment,
                )
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            return Node(process, listener, ready_file, log_file)

        yield start


def producer_client(port: int, model: Path) -> ProducerClient:
    checkpoint = open_checkpoint(model)
    identities = node_identities(
        checkpoint, load_tokenizer(model), element=ElementType.F16, lane=Lane.NATIVE, chunk_tokens=GRID
    )
    geometry = Geometry.of(checkpoint.spec, ElementType.F16)
    return ProducerClient(GrpcChannel("127.0.0.1", port), Consumer(checkpoint.spec, identities, geometry))


@contextlib.contextmanager
def posted_chat(port: int, **more: Any) -> Iterator[http.client.HTTPConnection]:
    """Send a chat; give the connection that its answer comes on."""
    body = {"model": "muser", "messages": [{"role": "user", "content": "word " * 40}], "temperature": 0, **more}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection


def ask_in_vain(port: int) -> None:
    """Wait for an answer until the node is killed."""
    with contextlib.suppress(OSError, http.client.HTTPException), posted_chat(port, max_tokens=4) as connection:
        connection.getresponse()


def read_in_vain(stream: Iterable[bytes]) -> None:
    """Read a handoff until the producer is killed."""
    with contextlib.suppress(WireError):
        for _ in stream:
            pass


@NODES
def test_ready_is_told_once_the_node_serves_and_stopping_when_it_drains(
    module: str, start: Start, tiny_llama: Path
) -> None:
    node = start(module)
    first = node.listener.next(START_S)
    assert first is not None
    assert first["STATUS"].startswith("loading")
    assert int(first["EXTEND_TIMEOUT_USEC"]) >= 30_000_000
    ready = node.ready()
    assert ready["STATUS"].startswith("serving")
    # By then the model is loaded and its kernels are admitted, and the port answers at once.
    assert "loaded model=" in node.log
    if module == "muser_prefill":
        assert "kernels=" in node.log
        client = producer_client(node.ports["control_port"], tiny_llama)
        assert client.refresh().state.value == "ready"
        client.stop()
    else:
        connection = http.client.HTTPConnection("127.0.0.1", node.ports["port"], timeout=5)
        connection.request("GET", "/ready")
        assert connection.getresponse().status == 200
        connection.close()
    node.process.send_signal(signal.SIGTERM)
    stopping = node.listener.until(lambda message: "STOPPING" in message, 30.0)
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30_000_000, "the drain's 30 s must fit in"
    assert node.process.wait(30.0) == 0


@NODES
def test_ready_is_never_told_by_a_node_that_cannot_load(module: str, start: Start, tmp_path: Path) -> None:
    node = start(module, "--model", str(tmp_path / "gone"))
    assert node.process.wait(START_S) == 2
    node.listener.drain()
    assert all("READY" not in message for message in node.listener.heard)


@NODES
def test_an_engine_that_gets_on_feeds_the_watchdog_and_a_stuck_one_does_not(
    module: str, start: Start, tmp_path: Path, tiny_llama: Path
) -> None:
    flag = tmp_path / "hang"
    node = start(module, hang=flag)
    node.ready()
    for _ in range(3):
        node.listener.until(lambda message: "WATCHDOG" in message, WATCHDOG_S)
    flag.touch()
    if module == "muser_prefill":
        client = producer_client(node.ports["control_port"], tiny_llama)
        client.refresh()
        opened = client.open(tuple(range(5, 150)))
        asking = threading.Thread(target=read_in_vain, args=(opened.stream,))
    else:
        asking = threading.Thread(target=ask_in_vain, args=(node.ports["port"],))
    asking.start()
    # One feeding may be on its way; then systemd waits the whole interval in vain, and kills.
    node.listener.next(WATCHDOG_S / 2)
    assert node.listener.next(WATCHDOG_S) is None
    assert node.process.poll() is None, "its other threads live: it is the engine that is stuck"
    node.process.kill()
    asking.join(30.0)
    if module == "muser_prefill":
        client.stop()


def test_a_stream_under_way_is_finished_while_the_node_drains(start: Start) -> None:
    node = start("muser_decode")
    node.ready()
    port = node.ports["port"]
    with posted_chat(port, max_tokens=300, stream=True) as connection:
        lines = iter(connection.getresponse().readline, b"")
        assert next(lines).startswith(b"data: ")
        node.process.send_signal(signal.SIGTERM)
        node.listener.until(lambda message: "STOPPING" in message, 30.0)
        events = [line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"], "it was cut off"
    with pytest.raises(OSError, match="refused"), posted_chat(port):
        pass
    assert node.process.wait(60.0) == 0


def test_a_handoff_under_way_is_finished_while_the_producer_drains_and_a_new_one_is_refused(
    start: Start, tiny_llama: Path
) -> None:
    # Some 100 kB of planes at 50 kB/s: under way for seconds.
    node = start("muser_prefill", "--max-rate", "50k")
    node.ready()
    client = producer_client(node.ports["control_port"], tiny_llama)
    client.refresh()
    opened = client.open(tuple(range(5, 150)))
    frames = iter(opened.stream)
    handoff, planes = opened.handoff, bytearray(1 << 20)

    def destination(segment: Segment) -> memoryview:
        return memoryview(planes)[: segment.nbytes]

    handoff.receive(next(frames), destination)
    node.process.send_signal(signal.SIGTERM)
    node.listener.until(lambda message: "STOPPING" in message, 30.0)
    with pytest.raises(HandoffRefused, match="shutting down"):
        client.open(tuple(range(5, 150)))
    for frame in frames:
        handoff.receive(frame, destination)
    assert handoff.state.value == "sealed"
    handoff.end_of_input()
    client.stop()
    assert node.process.wait(60.0) == 0


def configure(home: Path, module: str, text: str) -> None:
    (home / f"{module.removeprefix('muser_')}.toml").write_text(text)


@NODES
def test_sighup_reads_the_file_again_and_a_bad_one_is_refused(module: str, start: Start, home: Path) -> None:
    configure(home, module, "")
    node = start(module)
    node.ready()

    def reload(text: str) -> None:
        configure(home, module, text)
        node.process.send_signal(signal.SIGHUP)
        node.listener.until(lambda message: "RELOADING" in message, 30.0)
        node.ready()

    rate = "max_rate = '1M'\n" if module == "muser_prefill" else ""
    reload(f"[network]\n{rate}host = '::1'\n[process]\nlog_level = 'debug'\n")
    assert "config_changed key=log_level" in node.log
    assert ("config_changed key=max_rate" in node.log) == (module == "muser_prefill")
    assert "config_needs_restart keys=host" in node.log
    reload("[process]\nlog_level = 'error'\nlog_levle = 'info'\n")
    assert "toml:3: unknown key process.log_levle: perhaps process.log_level is meant" in node.log
    assert "config_kept" in node.log
    reload("[process]\nlog_level = 'error'\n")
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(60.0) == 0
    # The refused file changed nothing, so what followed it is in the log; the last one has silenced it.
    assert "config_changed key=log_level" in node.log.rpartition("config_kept")[0]
    assert "draining" not in node.log
