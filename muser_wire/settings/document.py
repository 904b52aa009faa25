"""A node's TOML file: read under a bound, its version checked first, each key with the line that it stands in."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muser_wire.settings.errors import SettingsError
from muser_wire.settings.keys import Key, Keys
from muser_wire.settings.values import from_toml

VERSION = 1
"""The version of the file's keys that this Muser reads; one more whenever a key changes its meaning or goes."""

VERSION_KEY = "config_version"

MAX_LINES = 1000
"""More than every key with a comment of ten lines. Finding a line parses the file once for each line before it."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """What a file says: value and line of each key, by the key's name."""

    path: Path
    values: dict[str, object]
    lines: dict[str, int]


def read_document(path: Path, keys: Keys) -> Document:
    """Return what a file says.

    Raises:
        SettingsError: it cannot be read, is not TOML, is of a newer version, has an unknown key or one in another
            table than its own, or a value that cannot be used. The message names file, line and key.
    """
    text = _read(path)
    table = _parse(path, text)
    places = dict(_places(text))
    _check_version(path, table, places)
    known: dict[KeyPath, Key] = {(key.section, key.name) if key.section else (key.name,): key for key in keys.keys}
    values: dict[str, object] = {}
    lines: dict[str, int] = {}
    for at, value in _leaves(table, {key.section for key in keys.keys}):
        key = known.get(at)
        line = places.get(at, 1)
        if key is None:
            raise SettingsError(f"{path}:{line}: {_unknown(at, known)}")
        try:
            values[key.name], lines[key.name] = from_toml(key, value, path.parent), line
        except SettingsError as error:
            raise SettingsError(f"{path}:{line}: {key.name} {_joined(str(error))}") from error
    return Document(path, values, lines)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 at byte {error.start}") from error
    if text.count("\n") > MAX_LINES:
        raise SettingsError(f"{path} has more than {MAX_LINES} lines")
    return text


def _parse(path: Path, text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error


def _check_version(path: Path, table: dict[str, object], places: dict[KeyPath, int]) -> None:
    version = table.pop(VERSION_KEY, VERSION)
    place = f"{path}:{places.get((VERSION_KEY,), 1)}"
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise SettingsError(f"{place}: {VERSION_KEY} is {version!r}; it takes a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise SettingsError(
            f"{place}: {VERSION_KEY} is {version}, and this Muser reads up to {VERSION}: the file is for a newer Muser"
        )


def _leaves(table: dict[str, object], sections: set[str]) -> Iterator[tuple[KeyPath, object]]:
    """Yield path and value of each key; a table that is no section of ours counts as one key."""
    for name, value in table.items():
        if isinstance(value, dict) and name in sections:
            yield from (((name, inner), content) for inner, content in value.items())
        else:
            yield (name,), value


def _unknown(at: KeyPath, known: dict[KeyPath, Key]) -> str:
    """Return what is wrong with a key that is not ours, and the one that was perhaps meant."""
    name = at[-1]
    elsewhere = [path for path in known if path[-1] == name]
    if elsewhere:
        return f"{'.'.join(at)} is not read here: {name} stands in {_table(elsewhere[0])}"
    if len(at) == 1 and any(path[:-1] == at for path in known):
        return f"{name} is a table of keys, and here it is none"
    names = {path[-1]: path for path in known}
    sections = {path[0]: path[:1] for path in known if len(path) > 1} if len(at) == 1 else {}
    near = difflib.get_close_matches(name, [*names, *sections], n=1)
    if not near:
        return f"unknown key {'.'.join(at)}"
    meant = names[near[0]] if near[0] in names else sections[near[0]]
    return f"unknown key {'.'.join(at)}: perhaps {'.'.join(meant)} is meant"


def _table(path: KeyPath) -> str:
    return f"the table [{path[0]}]" if len(path) > 1 else "no table, above them all"


def _joined(problem: str) -> str:
    return problem if problem.startswith("is ") else f"is wrong: {problem}"


def _places(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the line, from 1, at which each key's statement begins, in any spelling that TOML has.

    tomllib does not tell lines, so it is asked what the file says up to each line: a key's statement begins after
    the last place before it where the file could have ended.
    """
    seen: set[KeyPath] = set()
    begins = 0
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        try:
            table = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(table):
            if path not in seen:
                seen.add(path)
                yield path, begins + 1
        begins = count


def _paths(table: dict[str, object]) -> Iterator[KeyPath]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, inner) for inner in value)
