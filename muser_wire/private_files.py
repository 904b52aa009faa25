"""Files that are published whole or not at all; private ones are refused when others could have read or written them.

A reader sees the old content or the new, never half of it: the content is written beside the file,
synced, and renamed over it; then the folder is synced, so that the new name outlives a power cut.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from muser_wire.errors import WireError

PRIVATE_FOLDER_MODE = 0o700


class KeyFileError(WireError):
    """A key file cannot be used: its mode, size or place is wrong. The message names it."""

    code = "key_file"


def publish_private(path: Path, content: bytes, *, keep_existing: bool = False) -> None:
    """Replace a file's content, mode 0600, in a folder of mode 0700.

    With `keep_existing`, a file that is there by then stands: of two writers the first one wins.

    Raises:
        KeyFileError: it cannot be written; what was there before is unchanged.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER_MODE)
        temporary = _write_synced(path, content)
        if keep_existing:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        else:
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def publish(path: Path, content: bytes) -> None:
    """Replace a file that is for everybody, whole or not at all, with the mode that the umask gives; not synced.

    Raises:
        OSError: it cannot be written; what was there before is unchanged, and nothing half-written lies beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_private(path: Path, at_most: int) -> bytes:
    """Return the content, up to `at_most` bytes, of a file that nobody else can read or replace.

    Raises:
        KeyFileError: its mode or its folder's lets others in, it is larger, or it cannot be read.
    """
    try:
        _check_folder(path.parent)
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise KeyFileError(f"{path} has mode {mode:04o}; others can read it: chmod 600 {path}")
            content = file.read(at_most + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > at_most:
        raise KeyFileError(f"{path} has more than {at_most} bytes")
    return content


def _check_folder(folder: Path) -> None:
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        raise KeyFileError(f"folder {folder} has mode {mode:04o}; others can put files there: chmod 700 {folder}")


def _write_synced(path: Path, content: bytes) -> Path:
    """Return a new file of a name that nobody can guess, mode 0600, beside `path`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(name)
        raise
    return Path(name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
