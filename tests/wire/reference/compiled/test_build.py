from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import exact_kernels
import pytest

from muser_prefill.kernels.exact.choice import admitted_among
from muser_prefill.kernels.exact.compiled import compiled_kernels
from muser_wire.errors import KernelUnavailable
from muser_wire.reference import constants
from muser_wire.reference.compiled import build
from muser_wire.reference.compiled.library import load

Script = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`compiler(text)`: a shell script is the compiler; "$REAL" in it is the true one."""
    real = build._compiler()

    def install(text: str) -> Path:
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/sh\nREAL={real}\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return install


COUNTING = """case "$*" in *exact.cpp*) echo once >> "$(dirname "$0")/compiled";; esac
exec "$REAL" "$@"
"""


def test_of_two_nodes_that_start_at_once_one_compiles(tmp_path: Path, compiler: Script) -> None:
    compiler(COUNTING)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.shared_object(tmp_path / "kernels"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert found[0].stat().st_size > 0
    assert build.shared_object(tmp_path / "kernels") == found[0]
    assert (tmp_path / "compiled").read_text().count("once") == 1
    # Nothing half-made is left beside it.
    assert sorted(path.name for path in (tmp_path / "kernels").iterdir()) == [found[0].name, "lock"]


def test_other_constants_or_flags_are_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def note(compiler: str, flags: list[str], sources: dict[str, str], path: Path) -> None:
        made.append(path.name)
        path.touch()

    monkeypatch.setattr(build, "_compile", note)
    build.shared_object(tmp_path)
    build.shared_object(tmp_path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    build.shared_object(tmp_path)
    monkeypatch.setattr(build, "constants", lambda: "// other")
    build.shared_object(tmp_path)
    assert len(set(made)) == len(made) == 3


def test_old_ones_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age in range(9):
        old = tmp_path / f"exact-{age}.so"
        old.touch()
        os.utime(old, (1000 - age, 1000 - age))
    monkeypatch.setattr(build, "_compile", lambda compiler, flags, sources, path: path.touch())
    newest = build.shared_object(tmp_path).name
    assert {path.name for path in tmp_path.glob("*.so")} == {newest, "exact-0.so", "exact-1.so", "exact-2.so"}


def test_without_a_compiler_it_is_said_which_were_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailable, match=re.escape("none of c++, g++, clang++ is on the path")):
        build.shared_object(tmp_path / "kernels")


def test_what_a_failing_compiler_says_is_repeated(tmp_path: Path, compiler: Script) -> None:
    compiler('case "$*" in *exact.cpp*) echo "exact.cpp:1: error: no such thing" >&2; exit 1;; esac\nexec "$REAL" "$@"')
    with pytest.raises(KernelUnavailable, match="error: no such thing"):
        build.shared_object(tmp_path / "kernels")
    assert list((tmp_path / "kernels").glob("*.so")) == []


def test_a_compiler_that_does_not_end_is_given_up(
    tmp_path: Path, compiler: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It ends when its input does, so that nothing stays behind.
    compiler('case "$*" in *exact.cpp*) exec sleep 60;; esac\nexec "$REAL" "$@"')
    monkeypatch.setattr(build, "COMPILE_S", 0.2)
    with pytest.raises(KernelUnavailable, match="timed out"):
        build.shared_object(tmp_path / "kernels")


def test_a_library_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, compiler: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut half a library would end each later start: it is found by its name and loaded."""
    compiler('while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo code > "$2"; fi; shift; done')
    steps: list[str] = []
    for name in ("fsync", "replace"):
        true = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, true=true: (steps.append(name), true(*given)))
    assert build.shared_object(tmp_path / "kernels").read_text() == "code\n"
    assert steps == ["fsync", "replace"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelUnavailable, match="cannot be written"):
        build.shared_object(tmp_path / "file" / "kernels")


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KernelUnavailable, match="0777"):
        build.shared_object(folder)


def test_another_user_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns a folder can put code there, whatever its mode: root is not to run what somebody else left."""
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    owner = os.geteuid()
    if owner == 0:
        owner = 12345
        os.chown(folder, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(KernelUnavailable, match=f"belongs to user {owner}"):
        build.shared_object(folder)


def test_the_constants_are_those_of_the_rules() -> None:
    text = build.constants()
    assert "constexpr int WEIGHT_GROUP = 32;" in text
    assert f"constexpr float LOG2_E = {float(constants.LOG2_E).hex()}f;" in text
    assert "EXP2_TERMS = 5;" in text
    values = re.search(r"EXP2_COEFFICIENTS\[\] = \{(.*)\};", text)
    assert values is not None
    assert [float.fromhex(item.strip().removesuffix("f")) for item in values[1].split(",")] == list(
        constants.EXP2_COEFFICIENTS
    )


def test_nothing_is_contracted(tmp_path: Path) -> None:
    """The machine code has no fused multiply-add, in any of the spellings of two kinds of processor."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here")
    path = build.shared_object(tmp_path / "kernels")
    code = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "muser_linear" in code
    assert not re.findall(r"\b(?:vfn?m(?:add|sub)\w*|fn?madd|fn?msub|fml[as])\b", code)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 levels")
@pytest.mark.parametrize("flags", [("x86-64", "-fopenmp"), ("x86-64-v3",), ("x86-64-v4", "-fopenmp")])
def test_older_processors_give_the_same_bytes(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dot products by the instructions of SSE2, AVX2 and AVX512BW; with threads and without."""
    level, *threads = flags
    if level == "x86-64-v4" and "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX512")
    monkeypatch.setattr(build, "_machine_flags", lambda compiler: [*threads, f"-march={level}"])
    made = compiled_kernels(load(build.shared_object(tmp_path)))
    for head_dim in (64, 80):
        assert len(admitted_among(made, exact_kernels.plain(), "compiled", head_dim, exact_kernels.CPU).admitted) == 3


def test_clang_makes_kernels_of_one_thread(compiler: Script) -> None:
    script = compiler('case "$*" in *-dM*) echo "#define __clang__ 1";; *) exec "$REAL" "$@";; esac')
    assert "-fopenmp" not in build._machine_flags(str(script))
    assert "-fopenmp" in build._machine_flags(str(compiler('exec "$REAL" "$@"')))
