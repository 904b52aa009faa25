"""The file system as kvpack uses it: few operations, so that tests can make each of them fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@dataclass(frozen=True)
class FileFacts:
    """A file's name, size in bytes, and last use in nanoseconds since 1970."""

    name: str
    nbytes: int
    used_ns: int


class Files:
    """Files of one flat directory. Every method raises OSError when the system refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self) -> None:
        """Make the directory, readable by this user alone."""
        self.directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def list(self) -> list[FileFacts]:
        """Return the regular files that are there."""
        facts = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                # A file may go away while the directory is read.
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        facts.append(FileFacts(entry.name, stat.st_size, stat.st_mtime_ns))
        return facts

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a new file and wait until its bytes are on the disk. What was there under this name is replaced."""
        with open(self.directory / name, "wb", opener=_private) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())

    def append(self, name: str, data: bytes) -> None:
        """Add to a file, made when it is not there. Nothing is waited for: what may be lost in a crash."""
        with open(self.directory / name, "ab", opener=_private) as file:
            file.write(data)

    def rename(self, name: str, to: str) -> None:
        """Give a file its final name, in one step."""
        os.replace(self.directory / name, self.directory / to)

    def sync(self) -> None:
        """Wait until renames and deletions are on the disk."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return (self.directory / name).read_bytes()

    def read_start(self, name: str, nbytes: int) -> bytes:
        """Return at most the first `nbytes` of a file."""
        with (self.directory / name).open("rb") as file:
            return file.read(nbytes)

    def delete(self, name: str) -> None:
        """Remove a file; harmless when it is not there."""
        (self.directory / name).unlink(missing_ok=True)

    def touch(self, name: str, used_ns: int) -> None:
        """Note when a file was last used."""
        os.utime(self.directory / name, ns=(used_ns, used_ns))

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Hold the directory's lock, which the system drops when the process ends. Yields False if another has it."""
        with open(self.directory / name, "ab", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
