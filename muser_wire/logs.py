"""Log lines: an event's name, then ids, sizes and durations; for people, or as one JSON object a line for programs.

Every call in this program has the form `log.info("event key=%s other=%d", ...)`, so the fields of the JSON object are
read from the template and its arguments. What libraries log goes the same way, and with JSON also what they write to
the standard error stream past Python, as gRPC's core does. Never a prompt, a token or a key: of an exception, the
text is shown only where it cannot quote one.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import TextIO

from muser_wire.errors import WireError

FORMATS = ("console", "json")
LINE = "%(asctime)s %(levelname)s %(name)s %(message)s"
NATIVE = "native"
"""The logger of lines that libraries write themselves."""

FLUSH_S = 1.0
"""How long, in seconds, the end of the process waits for the last of such lines."""

PIPE_NBYTES = 1 << 20
"""What may be written before a line was read: the most that Linux gives to any user."""

SHOWN = (WireError, RuntimeError, OSError, MemoryError)
"""Exceptions whose text is this program's, torch's, MLX's or the system's. Others may quote what a user sent."""

_OURS = re.compile(r"muser_(?:wire|prefill|decode)\b")
_TEMPLATE = re.compile(r"([a-z][a-z0-9_]*)((?: [a-z][a-z0-9_]*=%[0-9.]*[a-z])*)(\n%s)?")
_FIELD = re.compile(r" ([a-z][a-z0-9_]*)=%[0-9]*(?:\.([0-9]+))?([a-z])")
_CORE = re.compile(r"([IWEF])[0-9]{4} [0-9:.]+ +[0-9]+ ([^ \]]+:[0-9]+)\] (.*)")
"""A line of gRPC's core: severity, date, time, thread, place, text."""

_CORE_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def install(level: str, log_format: str) -> None:
    """Send every log line of this process to stderr in a format of FORMATS. Call once, before threads are started."""
    stream = sys.stderr
    if log_format == "json":
        stream = _through_the_log()
        logging.captureWarnings(True)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if log_format == "json" else ConsoleLines(LINE))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    sys.excepthook = _log_unhandled
    threading.excepthook = lambda args: _log_unhandled(args.exc_type, args.exc_value, args.exc_traceback)


class ConsoleLines(logging.Formatter):
    """Lines for people. Those below the first are the stack of an exception."""

    def formatException(self, ei: ExcInfo) -> str:  # noqa: N802 - the library names it
        """Return the stack of an exception and, where it may be shown, its text."""
        return "\n".join(_stack_lines(ei[1]))


class JsonLines(logging.Formatter):
    """One JSON object a line: `ts` (RFC 3339, UTC), `level`, `logger`, `event`, then the event's own fields.

    A line of a library has the event "message" and its text in `message`. A fault has its stack in `stack`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "ts": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line |= fields_of(record)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = type(record.exc_info[1]).__name__
            line["stack"] = list(_stack_lines(record.exc_info[1]))
        return json.dumps(line, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the event of a record and its fields, with the types that they were logged with."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    parsed = parse(str(record.msg)) if _OURS.match(record.name) else None
    if parsed is None or len(parsed[1]) + parsed[2] != len(arguments):
        return {"event": "message", "message": record.getMessage()}
    event, fields, has_stack = parsed
    values = {name: _value(digits, kind, value) for (name, digits, kind), value in zip(fields, arguments, strict=False)}
    if has_stack:
        values["stack"] = str(arguments[-1]).splitlines()
    return {"event": event, **values}


@lru_cache
def parse(template: str) -> tuple[str, tuple[tuple[str, str, str], ...], bool] | None:
    """Return the event of a template, its fields and whether a stack follows; None for a template of another form.

    A field is its name, the digits after the point, and the conversion.

    >>> parse("sealed handoff=%s seconds=%.3f")
    ('sealed', (('handoff', '', 's'), ('seconds', '3', 'f')), False)
    """
    match = _TEMPLATE.fullmatch(template)
    if match is None:
        return None
    fields = tuple((name, digits, kind) for name, digits, kind in _FIELD.findall(match[2]))
    return match[1], fields, match[3] is not None


def _value(digits: str, kind: str, value: object) -> object:
    if value == "-":
        return None
    if kind == "f" and isinstance(value, int | float):
        return round(float(value), int(digits or 6))
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _stack_lines(error: BaseException | None) -> Iterator[str]:
    """Yield where an exception, and what it came of, was raised: the outermost call first."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            yield f"{frame.filename}:{frame.lineno} {frame.name}"
        yield f"{type(error).__name__}: {error}" if isinstance(error, SHOWN) else type(error).__name__
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _log_unhandled(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        logging.getLogger("muser_wire.logs").critical("unhandled", exc_info=(kind, error, trace))


def _through_the_log() -> TextIO:
    """Have what is written to file descriptor 2 logged line by line; return a stream to where it went before.

    A process that is killed may lose the last lines that a library wrote; Python's own account of a fatal signal
    goes past this.
    """
    real = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
    faulthandler.enable(real)
    read_end, write_end = os.pipe()
    if sys.platform == "linux":
        # A library that writes while it holds the interpreter must not wait for the thread that reads.
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
    os.dup2(write_end, 2)
    os.close(write_end)
    reader = threading.Thread(target=_log_lines, args=(read_end,), name="native-log", daemon=True)
    reader.start()

    def restore() -> None:
        sys.stderr.flush()
        os.dup2(real.fileno(), 2)
        reader.join(FLUSH_S)

    atexit.register(restore)
    return real


def _log_lines(read_end: int) -> None:
    log = logging.getLogger(NATIVE)
    with os.fdopen(read_end, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            core = _CORE.match(line)
            if core is not None:
                logging.getLogger("grpc.core").log(_CORE_LEVELS[core[1]], "%s %s", core[2], core[3].rstrip())
            elif line.strip():
                log.warning("%s", line.rstrip())
