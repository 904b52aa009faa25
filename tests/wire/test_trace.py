from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from muser_wire.trace import configure_trace, now_ns, span


@pytest.fixture
def quiet_again() -> Iterator[None]:
    yield
    trace = logging.getLogger("muser.trace")
    for handler in list(trace.handlers):
        trace.removeHandler(handler)
        handler.close()
    trace.setLevel(logging.CRITICAL)


def test_spans_are_written_only_when_asked_for(tmp_path: Path, quiet_again: None) -> None:
    path = tmp_path / "trace.jsonl"
    span("copy", 1, now_ns())
    assert not path.exists()
    configure_trace(path)
    started = now_ns()
    span("copy", 2, started)
    (line,) = path.read_text().splitlines()
    written = json.loads(line)
    assert (written["kind"], written["index"], written["start_ns"]) == ("copy", 2, started)
    assert started <= written["stop_ns"] <= now_ns()
