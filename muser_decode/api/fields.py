"""Typed reads from a JSON object; each refusal names the field by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping

from muser_decode.api.errors import ApiError, invalid

_JSON_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class Fields:
    """One JSON object at `path`. A field that is absent or null reads as None; unknown fields do no harm."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path

    def param(self, name: str) -> str:
        """Return the path of a field, such as `messages[2].content`."""
        return f"{self._path}.{name}" if self._path else name

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._values)

    def values(self) -> dict[str, object]:
        """Return the whole object, unread."""
        return dict(self._values)

    def raw(self, name: str) -> object:
        """Return a field of any type."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(name, "a string")

    def boolean(self, name: str) -> bool | None:
        """Return a boolean; 0 and 1 are none."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_type(name, "a boolean")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer within `low` and `high`; 1.0 and true are none."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(name, "an integer")
        self._check_range(name, value, low, high)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number within `low` and `high`."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(name, "a number")
        self._check_range(name, value, low, high)
        return float(value)

    def array(self, name: str) -> list[object] | None:
        """Return an array."""
        value = self.raw(name)
        if value is None or isinstance(value, list):
            return value
        raise self._wrong_type(name, "an array")

    def object(self, name: str) -> Fields | None:
        """Return a nested object."""
        value = self.raw(name)
        return None if value is None else as_fields(value, self.param(name))

    def missing(self, name: str) -> ApiError:
        """Return the refusal of an object that lacks a field."""
        param = self.param(name)
        return invalid(param, f"Missing required parameter: {param!r}.", "missing_required_parameter")

    def _wrong_type(self, name: str, expected: str) -> ApiError:
        return wrong_type(self.param(name), expected, self.raw(name))

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            param = self.param(name)
            raise invalid(param, f"Invalid {param!r}: expected {low} to {high}, got {shown(value)}.")


def as_fields(value: object, path: str) -> Fields:
    """Return the JSON object `value` for reading.

    Raises:
        ApiError: 400, it is something else.
    """
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return Fields(value, path)


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    """Return the refusal of a value of another JSON type."""
    got = "null" if value is None else _JSON_NAMES[type(value)]
    return invalid(param, f"Invalid type for {param!r}: expected {expected}, got {got}.", "invalid_type")


def shown(value: object) -> str:
    """Return a value as a message quotes it: JSON, cut at 64 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 64 else text[:61] + "..."
