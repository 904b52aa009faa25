"""What a check found: a verdict, what was seen, and what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Numbers = dict[str, float | str | bool | None]


class Verdict(StrEnum):
    """What something means for answering chats."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `value` is for people, `numbers` for programs; `advice` says what to do, or is empty."""

    name: str
    verdict: Verdict
    value: str
    advice: str = ""
    numbers: Numbers = field(default_factory=dict)


def ok(name: str, value: str, **numbers: float | str | bool | None) -> Finding:
    """Return that nothing is wrong."""
    return Finding(name, Verdict.OK, value, "", numbers)


def warn(name: str, value: str, advice: str, **numbers: float | str | bool | None) -> Finding:
    """Return that it works, and could work better or stop working soon."""
    return Finding(name, Verdict.WARN, value, advice, numbers)


def bad(name: str, value: str, advice: str, **numbers: float | str | bool | None) -> Finding:
    """Return that it does not work."""
    return Finding(name, Verdict.BAD, value, advice, numbers)


def unknown(name: str, value: str, advice: str = "") -> Finding:
    """Return that nobody could tell."""
    return Finding(name, Verdict.UNKNOWN, value, advice)


def json_text(findings: Sequence[Finding]) -> str:
    """Return the findings for programs."""
    rows = [
        {"name": f.name, "verdict": f.verdict.value, "value": f.value, "advice": f.advice, **f.numbers}
        for f in findings
    ]
    return json.dumps({"findings": rows}, indent=2)


def table_text(findings: Sequence[Finding], width: int = 0) -> str:
    """Return the findings for people: a line each, names in a column of at least `width`, and what to do below."""
    width = max((width, *(len(finding.name) for finding in findings)))
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<8} {finding.name:<{width}} {finding.value}")
        if finding.advice:
            lines.append(" " * 9 + f"-> {finding.advice}")
    return "\n".join(lines)
