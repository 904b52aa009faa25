"""Named, typed access to what a checkpoint says about itself: GGUF metadata or config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muser_wire.errors import CheckpointError

# Far above any model; a field beyond it is damage, and sizes derived from it stay small integers.
MAX_INTEGER = 1 << 31


@dataclass(frozen=True)
class Fields:
    """The fields of one file. Each getter checks the type and range and names the field when it refuses."""

    path: Path
    values: Mapping[str, object]

    def has(self, name: str) -> bool:
        """Tell whether the file gives this field a value; JSON null counts as none."""
        return self.values.get(name) is not None

    def get(self, name: str) -> object:
        """Return the value as the container gives it, or None."""
        return self.values.get(name)

    def integer(self, name: str, *, at_most: int = MAX_INTEGER, default: int | None = None) -> int:
        """Return a whole number from 1 to `at_most`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self.refusal(name, f"is {self.shown(value)}; expected a whole number from 1 to {at_most}")
        return value

    def token_id(self, name: str) -> int | None:
        """Return a token id, or None when the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_INTEGER:
            raise self.refusal(name, f"is {self.shown(value)}; expected a token id")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(name, f"is {self.shown(value)}; expected a positive number")
        return float(value)

    def text(self, name: str) -> str:
        """Return a text field that must be there."""
        value = self._value(name, None)
        if not isinstance(value, str):
            raise self.refusal(name, f"is {self.shown(value)}; expected text")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, f"is {self.shown(value)}; expected true or false")
        return value

    def require(self, name: str, *allowed: object, why: str) -> None:
        """Check that a field is absent or holds one of `allowed`; `why` says what any other value would need."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, f"is {self.shown(value)}: {why}")

    def refusal(self, name: str, problem: str) -> CheckpointError:
        """Return the error that says what is wrong with the field `name`."""
        return CheckpointError(f"{self.path}: {name} {problem}")

    @staticmethod
    def shown(value: object) -> str:
        """Return a value as an error message quotes it, cut to a readable length."""
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.refusal(name, "is missing")
        return default
