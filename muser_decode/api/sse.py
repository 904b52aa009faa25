"""Server-sent events as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from muser_decode.engine.request import PrefillProgress

DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, object], name: str | None = None) -> bytes:
    """Return an event that carries JSON, with a name for clients that tell events apart by it."""
    data = b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def comment(progress: PrefillProgress | None) -> bytes:
    """Return a comment, which clients skip, about a prefill."""
    return f": prefilling {progress.done}/{progress.total}\n\n".encode() if progress else b": waiting\n\n"
