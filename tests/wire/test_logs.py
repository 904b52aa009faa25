from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muser_wire.errors import TransportError
from muser_wire.logs import ConsoleLines, JsonLines

ROOT = Path(__file__).resolve().parent.parent.parent
RESERVED = {"ts", "level", "logger", "event", "message", "exception", "stack"}


def line(message: str, *args: object, name: str = "muser_wire.test", exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord(name, logging.WARNING, __file__, 1, message, args, exc_info)
    record.created = 1_767_225_600.25
    text = JsonLines().format(record)
    assert text.isascii()
    assert "\n" not in text
    return dict(json.loads(text))


def test_fields_keep_their_types() -> None:
    shown = line("sealed handoff=%s tokens=%d seconds=%.3f whole=%s reason=%s", "ab", 7, 1.23456, True, "two words = x")
    assert shown == {
        "ts": "2026-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "muser_wire.test",
        "event": "sealed",
        "handoff": "ab",
        "tokens": 7,
        "seconds": 1.235,
        "whole": True,
        "reason": "two words = x",
    }


def test_what_is_missing_is_null_and_other_things_are_text() -> None:
    assert line("x id=%s", "-")["id"] is None
    assert line("x file=%s", Path("/a"))["file"] == "/a"
    assert line("x error=%s", TransportError("gone"))["error"] == "gone"


def test_an_event_needs_no_fields() -> None:
    assert line("stopped")["event"] == "stopped"


@pytest.mark.parametrize("hostile", ['a" b=1', "line\nbreak", "\x1b[31m", "é\u2028", "\ud800"])
def test_no_value_breaks_out_of_its_line(hostile: str) -> None:
    shown = line("x reason=%s", hostile)
    assert (shown["reason"], set(shown) - RESERVED) == (hostile, {"reason"})


def test_lines_of_libraries_are_messages() -> None:
    shown = line("Started server process [%d]", 7, name="uvicorn.error")
    assert (shown["event"], shown["message"]) == ("message", "Started server process [7]")
    # What looks like one of ours is none.
    assert line("x id=%s", "y", name="other")["message"] == "x id=y"


def test_a_stack_that_was_logged_as_text_is_a_list() -> None:
    shown = line("request_failed error=%s\n%s", "KeyError", "first\nsecond\n")
    assert (shown["event"], shown["error"], shown["stack"]) == ("request_failed", "KeyError", ["first", "second"])


def throw(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


class Formatted:
    """Both ways in which an exception reaches a log."""

    def __init__(self, error: BaseException) -> None:
        try:
            throw(error)
        except BaseException:
            info: Any = sys.exc_info()
        self.json = json.dumps(line("broke id=%s", "r1", exc_info=info))
        record = logging.LogRecord("muser_wire.test", logging.ERROR, __file__, 1, "broke id=%s", ("r1",), info)
        self.console = ConsoleLines("%(message)s").format(record)


@pytest.mark.parametrize(
    "error", [ValueError("a secret prompt"), KeyError("a secret prompt"), TypeError("a secret prompt")]
)
def test_an_exception_that_may_quote_a_prompt_is_named_without_its_text(error: Exception) -> None:
    for shown in (Formatted(error).json, Formatted(error).console):
        assert type(error).__name__ in shown
        assert "test_logs.py" in shown
        assert "secret" not in shown


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), OSError(28, "No space left"), TransportError("gone")]
)
def test_the_system_s_and_the_libraries_own_words_stay(error: Exception) -> None:
    for shown in (Formatted(error).json, Formatted(error).console):
        assert str(error) in shown


def test_a_cause_is_shown_and_its_text_hidden_likewise() -> None:
    try:
        throw(RuntimeError("the step failed"), ValueError("a secret prompt"))
    except RuntimeError as error:
        shown = line("broke", exc_info=(type(error), error, error.__traceback__))
    assert shown["stack"][-1] == "ValueError"
    assert "RuntimeError: the step failed" in shown["stack"]
    assert "secret" not in json.dumps(shown)


PROGRAM = """
import logging, os, sys, threading, warnings
from muser_wire.logs import install
install("info", sys.argv[1])
log = logging.getLogger("muser_wire.program")
log.debug("hidden")
log.info("begun tokens=%d", 5)
logging.getLogger("uvicorn.error").info("Started server process [%d]", 7)
os.write(2, b"E1130 22:40:16.439839   19616 chttp2_transport.cc:1403] ipv4:127.0.0.1:1: Got goaway\\n")
os.write(2, b"a library says so\\n")
print("muser: a line of a command", file=sys.stderr)
warnings.warn("old ways")
def fail(): raise ValueError("a secret prompt")
thread = threading.Thread(target=fail); thread.start(); thread.join()
fail()
"""


def run(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert done.returncode == 1
    assert "secret" not in done.stderr
    return done.stderr.splitlines()


def test_everything_on_stderr_is_json_to_the_last_line_of_a_process() -> None:
    lines = [json.loads(text) for text in run("json")]
    events = [(each["logger"], each["level"], each.get("message", each["event"])) for each in lines]
    assert ("muser_wire.program", "info", "begun") in events
    assert ("uvicorn.error", "info", "Started server process [7]") in events
    assert ("grpc.core", "error", "chttp2_transport.cc:1403 ipv4:127.0.0.1:1: Got goaway") in events
    assert ("native", "warning", "a library says so") in events
    assert ("native", "warning", "muser: a line of a command") in events
    assert any(logger == "py.warnings" and "old ways" in message for logger, _, message in events)
    unhandled = [each for each in lines if each["event"] == "unhandled"]
    assert [each["exception"] for each in unhandled] == ["ValueError", "ValueError"]
    assert all(each["level"] == "critical" for each in unhandled)


def test_the_console_has_the_same_events_for_people() -> None:
    lines = run("console")
    assert lines[0].endswith("INFO muser_wire.program begun tokens=5")
    assert sum("CRITICAL muser_wire.logs unhandled" in each for each in lines) == 2


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in the product, with where it is."""
    for package in ("muser_wire", "muser_prefill", "muser_decode"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id in ("log", "_log")
                    and node.func.attr in ("debug", "info", "warning", "error", "exception", "critical", "log")
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_log_call_names_an_event_and_its_fields() -> None:
    """Expected form, written here a second time: `event key=%s key=%d`, a stack perhaps below."""
    form = re.compile(r"[a-z][a-z0-9_]*( [a-z][a-z0-9_]*=%(\.[0-9])?[srdf])*(\n%s)?")
    calls = dict(log_calls())
    assert len(calls) > 30
    bad = []
    for where, call in calls.items():
        template, arguments = (
            (call.args[1], call.args[2:]) if call.func.attr == "log" else (call.args[0], call.args[1:])
        )  # type: ignore[attr-defined]
        if not isinstance(template, ast.Constant) or not isinstance(template.value, str):
            bad.append(f"{where}: the template is no literal")
            continue
        keys = re.findall(r" ([a-z0-9_]+)=%", template.value)
        if where.startswith("muser_wire/logs.py"):
            continue
        if not form.fullmatch(template.value):
            bad.append(f"{where}: {template.value!r}")
        elif template.value.count("%") != len(arguments) or len(set(keys)) != len(keys) or set(keys) & RESERVED:
            bad.append(f"{where}: fields do not fit: {template.value!r}")
    assert not bad
