"""Deltas of a parser, put together: pieces of one kind as one, and a call whose parts must be its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from muser_decode.formats.conversation import Call, CallPart, CallStart, Content, Delta, Reasoning


def together(deltas: Iterable[Delta]) -> list[Content | Reasoning | Call]:
    whole: list[Content | Reasoning | Call] = []
    name: str | None = None
    parts: list[str] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert name is None
            name, parts = delta.name, []
        elif isinstance(delta, CallPart):
            assert name is not None
            assert delta.text
            parts.append(delta.text)
        elif isinstance(delta, Call):
            assert (name, "".join(parts)) == (delta.name, delta.text)
            name = None
            whole.append(delta)
        else:
            assert name is None
            last = whole[-1] if whole else None
            if isinstance(last, Content | Reasoning) and type(last) is type(delta):
                whole[-1] = type(delta)(last.text + delta.text)
            else:
                whole.append(delta)
    assert name is None
    return whole


def called(name: str, arguments: Mapping[str, object]) -> Call:
    """A whole call: its text is what Python writes of its arguments."""
    return Call(name, arguments, json.dumps(arguments, ensure_ascii=False))
