from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import termination_as_interrupt
from muser_wire.process import SignalFlag, interruptions_held, reload_on_hangup, stop_on_signals, write_ready_file


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_signals_that_end_a_node_set_the_event(handlers: None, number: int) -> None:
    stop = stop_on_signals()
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.wait(5.0)


ALARMED = """
import signal, sys
from muser_wire.process import SignalFlag
flag, alarms = SignalFlag(), 0
def alarm(number, frame):
    global alarms
    alarms += 1
    if alarms % 2:
        flag.set()
signal.signal(signal.SIGALRM, alarm)
for turn in range(20_000):
    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 50))
    flag.wait(10e-6)
    flag.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
sys.exit(0 if alarms > 1000 else f"{alarms} signals came")
"""


def test_a_flag_is_set_wherever_the_signal_meets_the_wait() -> None:
    """Every other one sets it. With threading.Event the process soon waits for itself, with SimpleQueue for ever."""
    done = subprocess.run([sys.executable, "-c", ALARMED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_flag_wakes_who_waits_until_it_is_cleared() -> None:
    flag = SignalFlag()
    assert not flag.wait(0.0)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait(20.0)
    assert flag.wait(20.0)
    flag.clear()
    assert not flag.is_set()
    began = time.monotonic()
    assert not flag.wait(0.05)
    assert time.monotonic() - began >= 0.05, "what woke it before is forgotten"


def test_a_ready_file_appears_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("from a run before")
    write_ready_file(path, {"port": 4949})
    assert json.loads(path.read_text()) == {"pid": os.getpid(), "port": 4949}
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_comes_when_the_block_has_ended(handlers: None) -> None:
    steps: list[str] = []

    def handle(number: int, frame: object) -> None:
        steps.append("handled")

    signal.signal(signal.SIGTERM, handle)
    with interruptions_held():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("block")
    assert steps == ["block", "handled"]
    assert signal.getsignal(signal.SIGTERM) is handle


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_ignored_or_handled_by_nobody_stays_so(handlers: None, handler: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, handler)
    with interruptions_held():
        assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("moment", ["as it begins", "as it ends"])
def test_a_signal_that_raises_while_handlers_are_exchanged_takes_none_away(
    handlers: None, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    exchange = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        before = exchange(number, handler)
        # SIGINT is the first: of the others' handlers none has been exchanged yet.
        if number == signal.SIGINT and (handler is signal.default_int_handler) == (moment == "as it ends"):
            monkeypatch.setattr(signal, "signal", exchange)
            os.kill(os.getpid(), signal.SIGTERM if moment == "as it begins" else signal.SIGINT)
        return before

    exchange(signal.SIGINT, signal.default_int_handler)
    with termination_as_interrupt():
        monkeypatch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), interruptions_held():
            pass
        for number in (signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)


def test_beside_the_main_thread_nothing_is_held() -> None:
    done = threading.Event()

    def work() -> None:
        with interruptions_held():
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5.0)
    assert done.is_set()


@pytest.fixture
def hangup_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_without_a_terminal_means_reload(hangup_handler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_wire.process._has_terminal", lambda: False)
    stop = SignalFlag()
    reload = reload_on_hangup(stop)
    os.kill(os.getpid(), signal.SIGHUP)
    assert reload.wait(5.0)
    assert not stop.is_set()


WAITING = """
import fcntl, signal, sys, termios
from muser_wire.process import SignalFlag, reload_on_hangup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
stop = SignalFlag()
reload = reload_on_hangup(stop)
open(sys.argv[2], "w").close()
while not stop.wait(0.01):
    if reload.is_set():
        reload.clear()
        open(sys.argv[2] + ".reloaded", "w").close()
"""


@contextlib.contextmanager
def in_terminal(mode: str, ready: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run WAITING as the leader of a session on a terminal of its own; give it and the terminal's other end."""
    outside, inside = pty.openpty()
    command = [sys.executable, "-c", WAITING, mode, str(ready)]
    process = subprocess.Popen(command, stdin=inside, start_new_session=True)
    os.close(inside)
    try:
        eventually(ready.exists)
        yield process, outside
    finally:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_terminal_that_is_closed_ends_a_node_that_was_started_in_it(tmp_path: Path) -> None:
    with in_terminal("plain", tmp_path / "ready") as (process, terminal):
        process.send_signal(signal.SIGHUP)
        eventually((tmp_path / "ready.reloaded").exists)
        assert process.poll() is None, "the terminal is there, so somebody asked for a reload"
        os.close(terminal)
        assert process.wait(20.0) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see the signal taken")
def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    with in_terminal("nohup", tmp_path / "ready") as (process, terminal):
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        # It has taken the signal once none is pending, and would have ended by the time that it has slept again.
        eventually(lambda: int(status_of(process.pid)["ShdPnd"], 16) == 0)
        turns = int(status_of(process.pid)["voluntary_ctxt_switches"])
        eventually(lambda: int(status_of(process.pid)["voluntary_ctxt_switches"]) > turns + 5)
        assert process.poll() is None


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
