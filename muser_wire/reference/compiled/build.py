"""The compiled kernels' shared object: made once for a machine, by its own C++ compiler, and kept.

Where there is no compiler, or it fails, nothing is lost but speed: the plain operations give the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from muser_wire.errors import KernelUnavailable
from muser_wire.reference.constants import EXP2_COEFFICIENTS, table

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    # Every operation is rounded by itself: that is the lane.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
)
COMPILE_S = 120.0
"""How long a compiler may take. Seconds are usual."""
PROBE_S = 20.0
KEPT = 4
"""Shared objects that stay: those of other versions, and of other machines that share the folder."""


def shared_object(folder: Path) -> Path:
    """Return the compiled kernels for this machine; compiles them into `folder` where they are not there yet.

    Raises:
        KernelUnavailable: there is no compiler, it fails or takes too long, or the folder is another user's, or others
            can write into it.
    """
    compiler = _compiler()
    flags = [*FLAGS, *_machine_flags(compiler)]
    sources = {"constants.h": constants(), **{path.name: path.read_text() for path in sorted(SOURCE.iterdir())}}
    # The macros name the compiler's version and what the processor has.
    parts = [*flags, *(f"{name}\0{text}" for name, text in sources.items()), _macros(compiler, flags)]
    key = hashlib.sha256("\0".join(parts).encode())
    path = folder / f"exact-{key.hexdigest()[:16]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_folder(folder)
        with _locked(folder / "lock"):
            if not path.exists():
                _compile(compiler, flags, sources, path)
                _forget_old(folder)
    except OSError as error:
        raise KernelUnavailable(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _check_folder(folder: Path) -> None:
    """Check that only this user can put files there: what lies there is run."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise KernelUnavailable(f"folder {folder} belongs to user {found.st_uid}, not to this one, {os.geteuid()}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise KernelUnavailable(f"folder {folder} has mode {mode:04o}; others can put code there: chmod 700 {folder}")


def constants() -> str:
    """Return the lane's constants as C++, under the names that Python has for them."""
    lines = [f"constexpr int EXP2_TERMS = {len(EXP2_COEFFICIENTS)};"]
    for name, value in table().items():
        if isinstance(value, list):
            if all(isinstance(item, str) for item in value):
                lines.append(f"constexpr float {name.upper()}[] = {{{', '.join(f'{item}f' for item in value)}}};")
        elif isinstance(value, str):
            lines.append(f"constexpr float {name.upper()} = {value}f;")
        else:
            lines.append(f"constexpr int {name.upper()} = {value};")
    return "\n".join(["#pragma once", *lines, ""])


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise KernelUnavailable(f"no C++ compiler: none of {wanted or ', '.join(COMPILERS)} is on the path")


def _machine_flags(compiler: str) -> list[str]:
    """Return the flags beyond `FLAGS` that this compiler takes.

    Clang's OpenMP is not GCC's, the one that torch brings: its kernels run on one thread.
    """
    clang = "__clang__" in _macros(compiler, [])
    found: list[str] = []
    for flag in (*(() if clang else ("-fopenmp",)), "-march=native", "-mprefer-vector-width=512"):
        try:
            _run([compiler, flag, "-E", "-x", "c++", os.devnull], PROBE_S)
        except KernelUnavailable:
            continue
        found.append(flag)
    return found


def _macros(compiler: str, flags: list[str]) -> str:
    return _run([compiler, *flags, "-E", "-dM", "-x", "c++", os.devnull], PROBE_S)


def _compile(compiler: str, flags: list[str], sources: dict[str, str], path: Path) -> None:
    started = time.perf_counter()
    logger.info("kernel_compiling file=%s compiler=%s", path.name, compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        for name, text in sources.items():
            (Path(work) / name).write_text(text)
        unit, product = Path(work) / "exact.o", Path(work) / "exact.so"
        _run([compiler, *flags, "-c", f"{work}/exact.cpp", "-o", str(unit)], COMPILE_S)
        # Linked without the OpenMP library: where torch is, its own, which is loaded already, takes its place, so that
        # both share one pool of threads.
        dynamic = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        _run([compiler, "-shared", *dynamic, str(unit), "-o", str(product)], COMPILE_S)
        # All of it is on the disk before it has its name: half a library would end each later start.
        with product.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(product, path)
    logger.info("kernel_compiled file=%s compiler=%s seconds=%.1f", path.name, compiler, time.perf_counter() - started)


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=timeout_s)
    except subprocess.CalledProcessError as error:
        raise KernelUnavailable(f"{command[0]} failed: {_first_line(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} cannot be used: {_first_line(str(error))}") from error
    return done.stdout


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or [""]
    return lines[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder: of two nodes that start at once, one compiles and the other waits."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old(folder: Path) -> None:
    kept = sorted(folder.glob("exact-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[KEPT:]:
        path.unlink()
