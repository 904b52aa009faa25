"""Both nodes as a person starts them: `make serve`, stopped by Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
START_S = 100.0
STOP_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def made_serve(model: Path, log: Path, *, flags: str = "") -> Iterator[str]:
    """Yield the endpoint's URL once it is ready; both nodes' lines go to `log`. They must end well at Ctrl-C."""
    port = free_port()
    command = ["make", "-s", f"PY={sys.executable}", "serve", f"ARGS=--model {model} --port {port} {flags}"]
    with log.open("wb") as lines:
        made = subprocess.Popen(command, cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        await_ready(url, made, log)
        yield url
        os.killpg(made.pid, signal.SIGINT)
        assert made.wait(STOP_S) in (0, 2, -signal.SIGINT), log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)
        made.wait(STOP_S)


def await_ready(url: str, made: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert made.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"not ready within {START_S} s:\n{log.read_text()}")
