from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muser_wire.cli.ask import Endpoint
from muser_wire.cli.serve import LogMux

ROOT = Path(__file__).resolve().parents[3]
FaultPicker = Callable[[str], None]
Served = subprocess.Popen[str]


def test_lines_get_their_node_s_name_and_half_lines_wait() -> None:
    written: list[str] = []
    mux = LogMux(written.append)
    reader, writer = os.pipe()
    mux.add("decode", reader)
    os.write(writer, b"one\ntw")
    assert mux.pump(5)
    assert written == ["decode  | one"]
    os.write(writer, b"o\n\nlast")
    os.close(writer)
    mux.drain()
    assert written == ["decode  | one", "decode  | two", "decode  | ", "decode  | last"]
    assert not mux.pump(0)
    os.close(reader)


@pytest.fixture
def serving(fake_nodes: FaultPicker, tiny_llama: Path, free_port: int) -> Iterator[Callable[[], Served]]:
    """Start `muser serve` over the fake nodes; whatever the test does, it is gone afterwards."""
    started: list[Served] = []

    def start() -> Served:
        command = [
            sys.executable,
            "-m",
            "muser_wire.cli",
            "serve",
            "--model",
            str(tiny_llama),
            "--port",
            str(free_port),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        served = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(served)
        return served

    yield start
    for served in started:
        served.kill()
        served.wait()
        if served.stdout is not None:
            served.stdout.close()


def read_until(served: Served, pattern: str) -> re.Match[str]:
    """Read lines until one matches; the test's own timeout bounds the wait."""
    assert served.stdout is not None
    seen = []
    for line in served.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    pytest.fail(f"{pattern!r} never came, but: {''.join(seen)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_termination_stops_both_nodes_cleanly(
    number: signal.Signals, serving: Callable[[], Served], free_port: int
) -> None:
    served = serving()
    read_until(served, rf"Serving http://127\.0\.0\.1:{free_port}/v1 until Ctrl-C")
    assert Endpoint(free_port).ask("x", 1, lambda text: None).route == "remote"
    served.send_signal(number)
    rest, _ = served.communicate()
    assert "Stopping both nodes." in rest
    assert served.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        raise_refusal(free_port)


def raise_refusal(port: int) -> None:
    """Connect to a port; the error of a port without a listener is what the caller expects."""
    import socket

    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_the_decode_node_goes_on_without_the_producer(serving: Callable[[], Served], free_port: int) -> None:
    served = serving()
    read_until(served, "prefill | prefill starts with f32")
    read_until(served, "Serving")
    children = Path(f"/proc/{served.pid}/task/{served.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list a process's children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    read_until(served, r"The prefill node was ended by SIGKILL\. The decode node goes on alone\.")
    assert Endpoint(free_port).ask("x", 1, lambda text: None).route == "local"
    served.send_signal(signal.SIGINT)
    served.communicate()
    assert served.returncode == 0


def test_a_decode_node_that_ends_takes_all_down(fake_nodes: FaultPicker, serving: Callable[[], Served]) -> None:
    fake_nodes("decode-ends")
    printed, _ = serving().communicate()
    assert "decode  | line 99" in printed
    assert "muser: the decode node ended with exit code 7" in printed


def test_a_node_that_stops_badly_shows_in_the_exit_status(
    fake_nodes: FaultPicker, serving: Callable[[], Served]
) -> None:
    fake_nodes("prefill-stops-badly")
    served = serving()
    read_until(served, "Serving")
    served.send_signal(signal.SIGINT)
    served.communicate()
    assert served.returncode == 1
