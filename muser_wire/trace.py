"""Where the time of a handoff goes: spans of both nodes on one clock, written as JSON lines on request.

Off unless `configure_trace` was called; then a span costs a comparison. Times are nanoseconds of the
monotonic clock, which processes on one machine share; across machines only durations compare.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

_trace = logging.getLogger("muser.trace")
_trace.propagate = False
_trace.setLevel(logging.CRITICAL)


def configure_trace(path: Path) -> None:
    """Append every span of this process to `path`, one JSON object a line."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    _trace.addHandler(handler)
    _trace.setLevel(logging.DEBUG)


def now_ns() -> int:
    """Return the trace's clock, in nanoseconds."""
    return time.monotonic_ns()


def span(kind: str, index: int, start_ns: int) -> None:
    """Record that `kind` of work on unit `index` (a layer, segment or chunk) ran from `start_ns` until now."""
    if _trace.isEnabledFor(logging.DEBUG):
        _trace.debug(json.dumps({"kind": kind, "index": index, "start_ns": start_ns, "stop_ns": now_ns()}))
