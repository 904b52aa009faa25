from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from muser_wire.process import stop_on_signals, write_ready_file


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_signals_that_end_a_node_set_the_event(handlers: None, number: int) -> None:
    stop = stop_on_signals()
    assert isinstance(stop, threading.Event)
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(5.0)


def test_a_ready_file_appears_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("from a run before")
    write_ready_file(path, {"port": 4949})
    assert json.loads(path.read_text()) == {"pid": os.getpid(), "port": 4949}
    assert list(tmp_path.iterdir()) == [path]
