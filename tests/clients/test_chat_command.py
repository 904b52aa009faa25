"""`muser chat` as a process, in front of a node: several turns, and Ctrl-C in the middle of one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import mlx.core as mx
import pytest
from local_backend import LocalBackend, local_backend, served

from muser_decode.decoder import MlxDecoder
from muser_decode.engine.cache import KVCache

WAIT_S = 60.0
MAX_TOKENS = 1000


class Held:
    """Holds the decode step of a given number until it is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.reached, self.free = threading.Event(), threading.Event()
        whole = MlxDecoder.steps
        self.count = 0

        def steps(decoder: MlxDecoder, tokens: mx.array, caches: Sequence[KVCache]) -> mx.array:
            self.count += 1
            if self.count > number and not self.free.is_set():
                self.reached.set()
                assert self.free.wait(WAIT_S)
            return whole(decoder, tokens, caches)

        monkeypatch.setattr(MlxDecoder, "steps", steps)


@pytest.fixture
def backend(tiny_llama: Path) -> Iterator[LocalBackend]:
    with local_backend(tiny_llama) as backend:
        yield backend


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, 30)
    with served(backend) as url:
        command = [sys.executable, "-m", "muser_wire.cli", "chat", "--url", url, "--max-tokens", str(MAX_TOKENS)]
        pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as chat:
            assert chat.stdin is not None
            assert chat.stdout is not None
            chat.stdin.write("Tell me everything.\n")
            chat.stdin.flush()
            assert held.reached.wait(WAIT_S)
            # Something of the answer is on the screen.
            first = chat.stdout.read(1)
            assert first
            chat.send_signal(signal.SIGINT)
            first += "".join(iter_until(chat.stdout, "(stopped)\n"))
            held.free.set()
            wait_idle(backend)
            assert held.count < MAX_TOKENS // 2
            second, errors = chat.communicate("And now?\n", WAIT_S)
    assert (chat.returncode, errors) == (0, "")
    assert "answered" not in first
    assert "(local: no producer; " in second
    # The second turn knows the first: its prompt is longer than its own words.
    told = re.search(r"; ([0-9]+) prompt tokens, [0-9,]+ answered; first token after .* tokens/s\)\n$", second)
    assert told is not None, second
    assert int(told[1]) > len("Tell me everything. And now?")


def iter_until(lines: IO[str], last: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line == last:
            return


def wait_idle(backend: LocalBackend) -> None:
    end = time.monotonic() + WAIT_S
    while backend.engine.load:
        assert time.monotonic() < end
        time.sleep(0.01)
