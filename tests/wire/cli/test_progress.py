from __future__ import annotations

import io

from muser_wire.cli.progress import Meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(out: io.StringIO, step_s: float) -> str:
    clock = Clock()
    meter = Meter(out, clock)
    for done in range(0, 101, 10):
        meter.bytes_done("unpacking", done * 1_000_000, 100_000_000)
        clock.now += step_s
    meter.note("ready")
    return out.getvalue()


def test_a_log_gets_a_line_every_few_seconds() -> None:
    lines = run(io.StringIO(), step_s=2.0).splitlines()
    assert lines == [
        "unpacking: 30.0 MB of 100.0 MB",
        "unpacking: 60.0 MB of 100.0 MB",
        "unpacking: 90.0 MB of 100.0 MB",
        "unpacking: 100.0 MB of 100.0 MB",
        "ready",
    ]


def test_a_log_of_a_quick_step_gets_its_end_only() -> None:
    assert run(io.StringIO(), step_s=0.01).splitlines() == ["unpacking: 100.0 MB of 100.0 MB", "ready"]


def test_a_terminal_gets_a_bar_that_redraws_itself() -> None:
    text = run(Terminal(), step_s=1.0)
    assert text.count("\r") == 11
    assert text.count("\n") == 2
    assert f"[{'#' * 15}{'.' * 15}] 50.0 MB of 100.0 MB" in text
    assert text.endswith(f"[{'#' * 30}] 100.0 MB of 100.0 MB\nready\n")


def test_a_terminal_is_not_redrawn_more_often_than_anyone_sees() -> None:
    assert run(Terminal(), step_s=0.001).count("\r") == 2
