from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from muser_wire.notify import Notifier, Watchdog
from muser_wire.process import SignalFlag
from muser_wire.upkeep import Upkeep, set_log_level


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_a_hangup_is_acted_on_once_and_the_loop_ends_with_stop() -> None:
    stop, hangup, reloads = SignalFlag(), SignalFlag(), []

    def reload() -> None:
        reloads.append(1)
        if len(reloads) == 2:
            stop.set()
        else:
            # Another one came in while the first was acted on: it is not lost.
            hangup.set()

    upkeep = Upkeep(Watchdog(Notifier({}), lambda: 0.0), hangup, reload)
    hangup.set()
    upkeep.until(stop)
    assert len(reloads) == 2
    upkeep.look()
    assert len(reloads) == 2


def test_the_log_level_changes_in_a_running_process(root_level: None, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("muser.test")
    set_log_level("error")
    log.warning("not this")
    set_log_level("warning")
    log.warning("but this")
    assert [record.message for record in caplog.records] == ["but this"]
