from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from muser_wire.errors import WireError
from muser_wire.notify import Notifier
from muser_wire.settings.reload import Changes, Reloader
from muser_wire.settings.settings import Settings

Write = Callable[[str], Path]
Make = Callable[..., Settings]


class Node:
    """What took in which value, and a check and a refresh that can be made to fail."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, object]] = []
        self.refreshed = 0
        self.refuse = False

    def take(self, name: str) -> Callable[[object], None]:
        return lambda value: self.taken.append((name, value))

    def check(self, values: argparse.Namespace) -> None:
        if values.host == "bad":
            raise WireError("bad does not fit")

    def refresh(self) -> None:
        if self.refuse:
            raise WireError("the keys are gone")
        self.refreshed += 1

    def reloader(self, settings: Settings) -> Reloader:
        live = {"max_rate": self.take("max_rate"), "drain_s": self.take("drain_s")}
        changes = Changes(self.check, live, {"keys": self.refresh})
        return Reloader(settings, settings.read().namespace(), changes, Notifier({}))


@pytest.fixture
def node() -> Node:
    return Node()


def test_what_can_change_does_and_the_rest_is_named(
    node: Node, write: Write, settings: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write("model.model = '/m'\n")
    reload = node.reloader(settings())
    reload()
    assert (node.taken, node.refreshed) == ([], 1)
    write("model.model = '/m'\n[network]\nmax_rate = '2k'\nport = 7\n")
    reload()
    assert node.taken == [("max_rate", 2000.0)]
    assert "config_changed key=max_rate" in caplog.text
    assert "config_needs_restart keys=port" in caplog.text
    reload()
    assert node.taken == [("max_rate", 2000.0)], "an unchanged value is not applied again"
    assert caplog.text.count("config_needs_restart keys=port") == 2, "what waits for a restart is said each time"
    write("model.model = '/m'\n")
    reload()
    assert node.taken[1:] == [("max_rate", 0.0)], "a key that goes takes its default"


@pytest.mark.parametrize(
    "text", ["[network]\nmax_rate = 5\nprot = 1", "not toml", "[network]\nhost = 'bad'\nmax_rate = 5", "model = 5"]
)
def test_a_bad_file_changes_nothing_and_is_in_the_log(
    node: Node, write: Write, settings: Make, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    write("")
    reload = node.reloader(settings("--model", "m"))
    write(text)
    reload()
    assert node.taken == []
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith("config_kept reason=")
    # Files beside it are still looked at: a revoked key must not live on because of another mistake.
    assert node.refreshed == 1


def test_a_flag_still_wins_after_a_reload(node: Node, write: Write, settings: Make) -> None:
    reload = node.reloader(settings("--model", "m", "--max-rate", "1"))
    write("[network]\nmax_rate = 9\n[process]\ndrain_s = 1\n")
    reload()
    assert node.taken == [("drain_s", 1.0)]


def test_a_refresh_that_fails_is_in_the_log_by_its_name(
    node: Node, settings: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reload = node.reloader(settings("--model", "m"))
    node.refuse = True
    reload()
    assert "config_kept key=keys reason=the keys are gone" in caplog.text
