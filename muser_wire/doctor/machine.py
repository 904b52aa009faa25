"""Checks of this machine that need no node: Python, packages, the folder of keys, the disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from muser_wire.doctor.finding import Finding, bad, ok, unknown, warn

LEAST_PYTHON = (3, 11)
LEAST_FREE_NBYTES = 1_000_000_000
"""Below it a node may fail to write keys, logs or a store."""
SMALL_FREE_NBYTES = 10_000_000_000

NODE_LIBRARIES = {"prefill": "torch", "decode": "mlx"}
"""What tells that a node's extra is installed."""


def installed_nodes() -> list[str]:
    """Return the nodes whose libraries this environment has."""
    return [node for node, library in NODE_LIBRARIES.items() if importlib.util.find_spec(library) is not None]


def check_python() -> Finding:
    """Check the interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < LEAST_PYTHON:
        return bad("python", version, f"install Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer", version=version)
    return ok("python", f"{version}, {sys.executable}", version=version)


def check_packages(nodes: list[str]) -> Iterator[Finding]:
    """Check that every package that muser asks for on these nodes is there in a version that it takes."""
    try:
        version = importlib.metadata.version("muser")
        wanted = importlib.metadata.requires("muser") or []
    except importlib.metadata.PackageNotFoundError:
        yield unknown("packages", "muser is not installed, it runs from its source")
        return
    seen: dict[str, str | None] = {}
    for line in wanted:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == [\"'](\w+)[\"']", marker)
        if extra is not None and extra[1] not in nodes:
            continue
        platform = re.search(r"sys_platform == [\"'](\w+)[\"']", marker)
        if platform is None or platform[1] == sys.platform:
            name = re.split(r"[\[<>=!~ (]", requirement.strip(), maxsplit=1)[0]
            seen[name] = _missing(name, requirement.strip())
    yield from _package_findings(version, seen)


def _package_findings(version: str, seen: dict[str, str | None]) -> Iterator[Finding]:
    for name, problem in seen.items():
        if problem is not None:
            yield bad("packages", problem, f"pip install --upgrade {name}")
    if not any(seen.values()):
        told = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in seen)
        yield ok("packages", f"muser {version}; {told}", muser=version)


def _missing(name: str, requirement: str) -> str | None:
    """Return what is wrong with an installed package, None for nothing. Only lower bounds are looked at."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    least = re.search(r">=\s*([0-9.]+)", requirement)
    if least is not None and _numbers(found) < _numbers(least[1]):
        return f"{name} {found} is older than {least[1]}"
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def check_home(home: Path) -> Finding:
    """Check that MUSER_HOME is there, is this user's, and that nobody else can write to it."""
    try:
        return _home(home)
    except OSError as error:
        reason = error.strerror or error
        return bad("home", f"{home} cannot be looked at: {reason}", f"chown -R $USER {home}, or set MUSER_HOME")


def _home(home: Path) -> Finding:
    if not home.exists():
        return ok("home", f"{home} is not there yet; it is made when it is needed")
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        return bad("home", f"{home} cannot be written by this user", f"chown -R $USER {home}, or set MUSER_HOME")
    keys = home / "keys"
    for path in (keys, *(sorted(keys.iterdir()) if keys.is_dir() else ())):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            return bad("home", f"{path} is open to other users", f"chmod go-rwx {path}; was it read? then pair anew")
    return ok("home", str(home))


def check_disk(home: Path, cache_disk_nbytes: int = 0) -> Finding:
    """Check that there is room for models and for a store of `cache_disk_nbytes`, in bytes."""
    # Unlike Path.exists this takes a folder that may not be looked at for one that is not there.
    place = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
    free = shutil.disk_usage(place).free
    value = f"{free / 1e9:.1f} GB free at {place}"
    if free < LEAST_FREE_NBYTES:
        return bad("disk", value, "make room: keys, logs and stores may not be written", free_nbytes=free)
    if free < SMALL_FREE_NBYTES:
        return warn("disk", value, "make room: a model does not fit", free_nbytes=free)
    if free < cache_disk_nbytes:
        return warn(
            "disk",
            f"{value}, {cache_disk_nbytes / 1e9:.1f} GB may be kept",
            "make room or lower cache_disk_mb",
            free_nbytes=free,
        )
    return ok("disk", value, free_nbytes=free)
