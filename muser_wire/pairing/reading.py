"""JSON that somebody else may have written, read without guessing: these fields, these types, nothing twice."""

from __future__ import annotations

import json
import re
from typing import Any

from muser_wire.pairing.errors import PairingError

MAX_TIME_S = 1 << 37
"""Seconds since 1970: the year 6325, beyond any certificate and within what `datetime` can show."""


class Fields:
    """Checked reads of one JSON object that somebody else may have written: these keys, no other, no type guessed."""

    def __init__(self, value: Any, name: str, keys: set[str], version: int | None = None) -> None:
        # The version first: what a later Muser wrote is refused as such, whatever fields it has.
        if version is not None and isinstance(value, dict) and value.get("version") != version:
            raise PairingError(f"{name}.version is {value.get('version')!r}; this Muser reads version {version}")
        if not isinstance(value, dict) or value.keys() != keys:
            raise PairingError(f"{name} is not an object with exactly the fields {', '.join(sorted(keys))}")
        self._value: dict[str, Any] = value
        self._name = name

    def __getitem__(self, key: str) -> Any:
        return self._value[key]

    def text(self, key: str, pattern: re.Pattern[str]) -> str:
        """Return a text that the whole pattern matches."""
        value = self[key]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise PairingError(f"{self._name}.{key} is not a text of the form {pattern.pattern}")
        return value

    def blob(self, key: str, nbytes: int) -> bytes:
        """Return `nbytes` bytes, written in lower-case hex."""
        return bytes.fromhex(self.text(key, re.compile(f"[0-9a-f]{{{2 * nbytes}}}")))

    def time(self, key: str) -> int | None:
        """Return a time in seconds since 1970, or None."""
        value = self[key]
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= MAX_TIME_S:
            raise PairingError(f"{self._name}.{key} is not a time in seconds")
        return value


def parse_object(text: bytes, name: str) -> Any:
    """Return the JSON value in `text`, in which no object has a key twice.

    Raises:
        PairingError: it is not JSON; `name` begins the message.
    """
    try:
        return json.loads(text.decode("ascii"), object_pairs_hook=_without_duplicates)
    # Deep nesting exhausts the parser's stack.
    except (ValueError, RecursionError) as error:
        raise PairingError(f"{name} is damaged: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found
