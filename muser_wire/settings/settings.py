"""A node's settings: for each key the value that wins, and where it came from.

A flag wins over an environment variable, that one over the file, and the file over the default. Reading happens
anew at each call, so that a node can look whether its file has changed.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from muser_wire.settings.document import Document, read_document
from muser_wire.settings.errors import SettingsError
from muser_wire.settings.keys import CONFIG, NO_FILE, Key, Keys
from muser_wire.settings.values import default_of, from_text

DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """One value and where it came from, as people are told: "flag --port", a variable, a file's line, "default"."""

    key: Key
    value: object
    source: str


@dataclass(frozen=True)
class Read:
    """All settings as they were read at one moment; `file` is the one that was read, None without one."""

    settings: tuple[Setting, ...]
    file: Path | None

    def namespace(self) -> argparse.Namespace:
        """Return the values as parsed flags would stand.

        Raises:
            SettingsError: one that is needed is missing; the message says the ways to give it.
        """
        for setting in self.settings:
            if setting.key.required and setting.value is None:
                raise SettingsError(f"{setting.key.flag} is needed: {setting.source}")
        return argparse.Namespace(**{setting.key.name: setting.value for setting in self.settings})

    def changed(self, before: Read) -> list[str]:
        """Return the names of the keys whose value is another than `before`."""
        old = {setting.key.name: setting.value for setting in before.settings}
        return [setting.key.name for setting in self.settings if setting.value != old[setting.key.name]]


@dataclass(frozen=True)
class Settings:
    """Where a node's settings come from. `flags` are those that the command line gave, by key."""

    keys: Keys
    flags: Mapping[str, object]
    environment: Mapping[str, str]
    home: Path
    config: str | None = None
    """What `--config` said."""

    def read(self) -> Read:
        """Read environment and file.

        Raises:
            SettingsError: something in them cannot be used; the message names it and its place.
        """
        self._check_variables()
        path = self.file()
        document = None if path is None else read_document(path, self.keys)
        return Read(tuple(self._setting(key, document) for key in self.keys.keys), path)

    def file(self) -> Path | None:
        """Return the file to read: the one that was named, else the one in MUSER_HOME where that is there.

        Raises:
            SettingsError: one was named and is not there.
        """
        variable = self.keys.variable(CONFIG)
        named = self.config if self.config is not None else self.environment.get(variable)
        if named == NO_FILE:
            return None
        if named is None:
            path = self.home / f"{self.keys.node}.toml"
            return path if _is_there(path) else None
        path = Path(named).expanduser().absolute()
        if not _is_there(path):
            raise SettingsError(f"{'--config' if self.config is not None else variable} {path}: there is no such file")
        return path

    def _check_variables(self) -> None:
        """Refuse variables that look like ours and are not: a setting that is silently left out is a wrong one."""
        known = {self.keys.variable(name) for name in (CONFIG, *(key.name for key in self.keys.keys))}
        for name in sorted(self.environment):
            if name.startswith(self.keys.prefix) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f": perhaps {near[0]} is meant" if near else ""
                raise SettingsError(f"environment variable {name} is none of this node's{hint}")

    def _setting(self, key: Key, document: Document | None) -> Setting:
        return next(self._candidates(key, document))

    def _candidates(self, key: Key, document: Document | None) -> Iterator[Setting]:
        """Yield the key's settings, the one that wins first."""
        variable = self.keys.variable(key.name)
        if key.name in self.flags:
            yield Setting(key, self.flags[key.name], f"flag {key.flag}")
        if variable in self.environment:
            try:
                yield Setting(key, from_text(key, self.environment[variable]), f"environment {variable}")
            except SettingsError as error:
                raise SettingsError(f"environment variable {variable}: {error}") from error
        if document is not None and key.name in document.values:
            yield Setting(key, document.values[key.name], f"{document.path}:{document.lines[key.name]}")
        default = default_of(key)
        yield Setting(key, default, self._ways(key) if key.required and default is None else DEFAULT)

    def _ways(self, key: Key) -> str:
        place = f"{key.name} in the table [{key.section}]" if key.section else f"{key.name}"
        return f"give the flag, or {self.keys.variable(key.name)}, or {place} of {self.keys.node}.toml"


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
