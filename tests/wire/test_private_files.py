from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muser_wire import private_files as files
from muser_wire.private_files import KeyFileError, publish, publish_private, read_private

STEPS = ("open", "fdopen", "fsync", "replace")


class Crash(BaseException):
    """The machine stops here; no cleaning up runs that would run for an error."""


def failing_at(step: int, error: BaseException) -> Callable[[pytest.MonkeyPatch], list[str]]:
    """Make the n-th system call of a publication fail; the list tells which were made."""

    def arm(patch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []

        def wrap(name: str) -> Callable[..., Any]:
            original = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                made.append(name)
                if len(made) - 1 == step:
                    raise error
                return original(*arguments, **options)

            return call

        for name in STEPS:
            patch.setattr(files.os, name, wrap(name))
        return made

    return arm


def test_a_publication_is_written_synced_renamed_and_the_folder_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = failing_at(-1, Crash())(monkeypatch)
    path = tmp_path / "keys" / "file"
    publish_private(path, b"new")
    assert made == ["open", "fdopen", "fsync", "replace", "open", "fsync"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("step", range(6))
def test_a_crash_at_any_step_leaves_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = tmp_path / "file"
    publish_private(path, b"old")
    with monkeypatch.context() as patch:
        failing_at(step, Crash())(patch)
        with pytest.raises(Crash):
            publish_private(path, b"new")
    assert read_private(path, 10) == (b"old" if step < 4 else b"new")


@pytest.mark.parametrize("step", range(4))
def test_a_full_disk_leaves_the_old_content_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = tmp_path / "file"
    publish_private(path, b"old")
    with monkeypatch.context() as patch:
        failing_at(step, OSError(errno.ENOSPC, "No space left on device"))(patch)
        with pytest.raises(KeyFileError, match="No space left on device"):
            publish_private(path, b"new")
    assert read_private(path, 10) == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_for_everybody_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    mask = os.umask(0o022)
    try:
        publish(path, b"old")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644
    failing_at(0, OSError(errno.ENOSPC, "No space left on device"))(monkeypatch)
    with pytest.raises(OSError, match="No space left on device"):
        publish(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_world_readable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish_private(path, b"secret")
    path.chmod(0o604)
    with pytest.raises(KeyFileError, match=r"mode 0604.*chmod 600"):
        read_private(path, 10)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "file"
    publish_private(path, b"secret")
    path.parent.chmod(0o770)
    with pytest.raises(KeyFileError, match=r"mode 0770.*chmod 700"):
        read_private(path, 10)


def test_a_larger_file_and_an_absent_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish_private(path, b"12345")
    assert read_private(path, 5) == b"12345"
    with pytest.raises(KeyFileError, match="more than 4 bytes"):
        read_private(path, 4)
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_private(tmp_path / "none", 4)
