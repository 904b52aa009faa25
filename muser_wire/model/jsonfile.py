"""JSON objects from files that somebody else wrote: size-bounded, without duplicate keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muser_wire.errors import CheckpointError

# The largest published tokenizer.json has 35 MB.
MAX_JSON_NBYTES = 256 << 20


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file cannot be read, is too large, or is not one JSON object.
    """
    return parse_object(path, read_bounded(path, MAX_JSON_NBYTES))


def read_bounded(path: Path, at_most: int) -> bytes:
    """Return a file's content of up to `at_most` bytes.

    Raises:
        CheckpointError: the file cannot be read or is larger.
    """
    try:
        nbytes = path.stat().st_size
        if nbytes > at_most:
            raise CheckpointError(f"{path} has {nbytes} bytes; such a file has at most {at_most}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`, a part of the file `path`.

    Raises:
        CheckpointError: `text` is not one JSON object, or an object in it has a key twice.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    # Deep nesting exhausts the parser's stack; bad UTF-8 and bad JSON are both ValueErrors.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found
