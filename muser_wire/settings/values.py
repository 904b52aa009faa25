"""From what a file or a variable says to the value that the flag would have given."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from muser_wire.settings.errors import SettingsError
from muser_wire.settings.keys import Key

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")
_TRUTH = {"true": True, "false": False}


def from_text(key: Key, text: str) -> object:
    """Return the value in an environment variable.

    Raises:
        SettingsError: it cannot be one of this key.
    """
    if key.is_switch:
        if text not in _TRUTH:
            raise SettingsError(f"{text!r} is neither true nor false")
        return _TRUTH[text]
    if key.is_list:
        return [_convert(key, part.strip()) for part in text.split(",") if part.strip()]
    return _convert(key, text)


def from_toml(key: Key, value: object, folder: Path) -> object:
    """Return the value in a TOML file. A single value stands for an array of one; paths begin in `folder`.

    Raises:
        SettingsError: it is of another type or out of range; the message says what would do.
    """
    if key.is_switch:
        if not isinstance(value, bool):
            raise SettingsError(f"is {_kind(value)}; it takes true or false")
        return value
    if key.is_list:
        return [_one(key, item, folder) for item in (value if isinstance(value, list) else [value])]
    return _one(key, value, folder)


def default_of(key: Key) -> object:
    """Return what the key is without anybody saying; argparse reads a default that is a string like a flag's."""
    default = key.action.default
    return _convert(key, default) if isinstance(default, str) else default


def _one(key: Key, value: object, folder: Path) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SettingsError(f"is {_kind(value)}; it takes {'a string' if key.action.type is None else 'one value'}")
    text = str(folder / _without_tilde(value)) if key.is_path and isinstance(value, str) else str(value)
    converted = _convert(key, text)
    is_number = isinstance(converted, int | float)
    if not isinstance(value, str) and not is_number:
        raise SettingsError(f"is {_kind(value)}; it takes a string")
    if isinstance(value, str) and is_number and _NUMBER.fullmatch(value):
        raise SettingsError(f"is a string; it takes a number: write {value} without quotes")
    return converted


def _without_tilde(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{text!r} is in a home that is not known here") from error


def _convert(key: Key, text: str) -> object:
    """Return what argparse would make of a flag's value."""
    action = key.action
    try:
        value: object = text if action.type is None else _call(action.type, text)
    except argparse.ArgumentTypeError as error:
        raise SettingsError(str(error)) from error
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{text!r} cannot be read") from error
    if action.choices is not None and value not in action.choices:
        raise SettingsError(f"{text!r} is none of {', '.join(map(str, action.choices))}")
    return value


def _call(kind: object, text: str) -> object:
    if not callable(kind):
        raise SettingsError(f"a type named {kind!r} is not read here")
    return kind(text)


def _kind(value: object) -> str:
    """Return a TOML value's type as TOML calls it."""
    kinds = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return kinds.get(type(value), "a date or time")
