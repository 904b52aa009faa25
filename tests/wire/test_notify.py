from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from notify_listener import Listener

from muser_wire.notify import Notifier, Watchdog, more_time_to_load

LONG_S = 10.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify", watchdog_s=8.0)
    yield listener
    listener.close()


def test_each_state_is_one_datagram_of_lines(listener: Listener) -> None:
    notifier = Notifier(listener.environment)
    notifier.ready("serving\nx=1")
    assert listener.next(LONG_S) == {"READY": "1", "STATUS": "serving x=1"}
    notifier.stopping(2.5, "draining")
    assert listener.next(LONG_S) == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "2500000", "STATUS": "draining"}
    notifier.alive()
    assert listener.next(LONG_S) == {"WATCHDOG": "1"}
    notifier.reloading()
    message = listener.next(LONG_S)
    assert message is not None
    assert message["RELOADING"] == "1"
    assert int(message["MONOTONIC_USEC"]) > 0


@pytest.mark.skipif(not hasattr(socket, "SOCK_CLOEXEC"), reason="abstract sockets are Linux's")
def test_an_abstract_socket_is_one_too() -> None:
    name = f"muser-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).alive()
        end.settimeout(LONG_S)
        assert end.recv(100) == b"WATCHDOG=1"


def test_without_a_socket_or_with_a_dead_one_nothing_happens(tmp_path: Path) -> None:
    Notifier({}).ready("x")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("x")
    assert Notifier({"WATCHDOG_USEC": "1000000"}).watchdog_s is None


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
    ],
)
def test_the_watchdog_is_this_process_s_own(variables: dict[str, str], seconds: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/x", **variables}).watchdog_s == seconds


def test_the_watchdog_is_fed_by_progress_alone(listener: Listener) -> None:
    now, progress = 100.0, 1.0
    watchdog = Watchdog(Notifier(listener.environment), lambda: progress, lambda: now)

    def fed() -> bool:
        watchdog.look()
        return listener.next(0.0) is not None

    assert fed()
    now, progress = 101.9, 2.0
    assert not fed(), "more often than a quarter of the 8 s is of no use"
    now = 102.0
    assert fed()
    now = 10_000.0
    assert not fed(), "no progress, no sign of life, however long it takes"
    progress = 3.0
    assert fed()


def test_loading_gets_more_time_while_it_computes(listener: Listener) -> None:
    used = iter(range(1000))
    with more_time_to_load(Notifier(listener.environment), "loading m", every_s=0.001, used_s=lambda: next(used)):
        first = listener.next(LONG_S)
        assert first == {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "loading m"}
        again = listener.until(lambda message: "so far" in message["STATUS"], LONG_S)
        assert again["EXTEND_TIMEOUT_USEC"] == "60000000"
    listener.drain()
    assert listener.next(0.05) is None, "loaded: nothing more is asked for"


def test_loading_that_hangs_gets_no_more_time(listener: Listener) -> None:
    looks = 0

    def used_s() -> float:
        nonlocal looks
        looks += 1
        return 7.0

    with more_time_to_load(Notifier(listener.environment), "loading m", every_s=0.001, used_s=used_s):
        assert listener.next(LONG_S) is not None
        while looks < 20:
            pass
    assert listener.next(0.0) is None


def test_a_block_that_fails_ends_the_asking(listener: Listener) -> None:
    with pytest.raises(KeyError), more_time_to_load(Notifier(listener.environment), "loading m", every_s=60.0):
        raise KeyError
    assert listener.next(LONG_S) is not None
    assert listener.next(0.0) is None
