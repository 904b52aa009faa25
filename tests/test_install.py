"""Installing: what pip would take on both machines that Muser is for, and what a built wheel and sdist hold."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CUDA = ("nvidia-", "cuda-", "triton")
"""What a torch with CUDA asks for beside itself: hundreds of megabytes, some of which pip would fetch to read names."""
OFFLINE = ("connection", "timed out", "temporary failure", "name or service", "network is unreachable")
MACOS = {
    "sys_platform": "darwin",
    "platform_system": "Darwin",
    "platform_machine": "arm64",
    "os_name": "posix",
    "tags": "macosx_14_0_arm64",
}
GB10 = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "aarch64",
    "os_name": "posix",
    "tags": " ".join(["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 40))]),
}
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.9", "implementation_name": "cpython"}


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _applies(requirement: Requirement, machine: dict[str, str], extras: frozenset[str]) -> bool:
    """Say whether a requirement counts on a machine; pip itself would ask the machine that it runs on."""
    environment = {key: value for key, value in machine.items() if key != "tags"} | PYTHON
    return requirement.marker is None or any(
        requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras | {""}
    )


def _chosen(
    requirements: list[Requirement], machine: dict[str, str], folder: Path, constraints: list[str]
) -> list[dict[str, Any]]:
    """Return what pip would install for these alone, wheels for the machine only. Metadata is all that is fetched."""
    report = folder / "report.json"
    platforms = [part for tag in machine["tags"].split() for part in ("--platform", tag)]
    named = [
        f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}{one.specifier}" for one in requirements
    ]
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--no-deps",
            "--only-binary=:all:",
            "--ignore-installed",
        ),
        *("--retries", "1", "--timeout", "20", "--quiet", "--report", str(report), "--target", str(folder / "target")),
        *("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"),
        *platforms,
        *constraints,
        *named,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    if done.returncode:
        if any(sign in done.stderr.lower() for sign in OFFLINE):
            pytest.skip("the package index cannot be reached")
        pytest.fail(f"pip finds no wheels of {named} for {machine['tags']}:\n{done.stderr}")
    return json.loads(report.read_text())["install"]


@pytest.mark.slow
@pytest.mark.parametrize("constraints", [[], ["-c", str(ROOT / "constraints.txt")]], ids=["newest", "as-in-the-README"])
@pytest.mark.parametrize(
    ("extra", "machine"), [("decode", MACOS), ("prefill", GB10)], ids=["macos-arm64", "linux-aarch64"]
)
def test_an_extra_resolves_to_wheels_alone(
    extra: str, machine: dict[str, str], constraints: list[str], tmp_path: Path
) -> None:
    project = _project()
    lines = [*project["dependencies"], *project["optional-dependencies"][extra]]
    due = [(Requirement(line), frozenset[str]()) for line in lines]
    found: dict[str, str] = {}
    cuda: set[str] = set()
    while due:
        level: dict[str, Requirement] = {}
        for requirement, extras in due:
            name = canonicalize_name(requirement.name)
            if not _applies(requirement, machine, extras) or name in found:
                continue
            if name.startswith(CUDA):
                cuda.add(name)
            else:
                level.setdefault(name, requirement)
        if not level:
            break
        due = []
        for one in _chosen(list(level.values()), machine, tmp_path, constraints):
            name = canonicalize_name(one["metadata"]["name"])
            found[name] = one["download_info"]["url"].rsplit("/", 1)[-1]
            wanted = frozenset(level[name].extras)
            due += [(Requirement(line), wanted) for line in one["metadata"].get("requires_dist", [])]
    assert found
    assert all(file.endswith(".whl") for file in found.values())
    own, other = ("mlx", "torch") if extra == "decode" else ("torch", "mlx")
    assert own in found
    assert other not in found
    assert bool(cuda) is (extra == "prefill"), "a torch without CUDA, or CUDA on a Mac"


@dataclasses.dataclass(frozen=True)
class Built:
    """A wheel, and the names in it and in the sdist."""

    wheel: Path
    in_wheel: list[str]
    in_sdist: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A wheel and an sdist, both built from the files that git does not ignore."""
    folder = tmp_path_factory.mktemp("build")
    files = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, files.split("\0")):
        source, target = ROOT / name, folder / "source" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    program = (
        "import sys; from setuptools import build_meta; folder = sys.argv[1];"
        "build_meta.build_wheel(folder); build_meta.build_sdist(folder)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(folder)],
        check=False,
        cwd=folder / "source",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        in_sdist = [name.split("/", 1)[1] for name in sdist.getnames() if "/" in name]
    return Built(wheel, in_wheel, in_sdist)


def test_a_wheel_holds_what_the_nodes_need_and_nothing_else(built: Built) -> None:
    wheel = built.in_wheel
    tops = {name.split("/", 1)[0] for name in wheel}
    assert {top for top in tops if ".d" not in top} == {"muser_wire", "muser_prefill", "muser_decode"}
    data = [path for package in ("muser_wire", "muser_prefill", "muser_decode") for path in (ROOT / package).rglob("*")]
    missing = [
        str(path.relative_to(ROOT))
        for path in data
        if path.is_file() and "__pycache__" not in path.parts and str(path.relative_to(ROOT)) not in wheel
    ]
    assert not missing
    shipped = ("share/muser/proto/muser/v1/producer.proto", "share/muser/grafana/muser.json", "entry_points.txt")
    for shared in shipped:
        assert any(name.endswith(shared) for name in wheel)


def test_units_and_agents_come_out_of_the_wheel_and_no_template_lies_outside(built: Built, tmp_path: Path) -> None:
    """There are no template files: `service install` writes both texts itself, so the wheel's code is all it takes."""
    templates = (".service", ".plist", ".j2", ".tmpl", ".in")
    assert [name for name in (*built.in_wheel, *built.in_sdist) if name.endswith(templates)] == []
    with zipfile.ZipFile(built.wheel) as file:
        file.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "MUSER_HOME": str(tmp_path)}
    for module, expected in (("muser_prefill", "Type=notify"), ("muser_decode", "<key>KeepAlive</key>")):
        program = (
            f"import sys, {module}.__main__ as node; assert node.__file__.startswith(sys.argv.pop(1)), node.__file__;"
            "sys.exit(node.main())"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "installed"), "service", "install", "--dry-run"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_an_sdist_can_be_built_from(built: Built) -> None:
    sdist = built.in_sdist
    for name in ("pyproject.toml", "README.md", "LICENSE", "muser_wire/__init__.py"):
        assert name in sdist
    assert any(name.endswith(".proto") for name in sdist)
