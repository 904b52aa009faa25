"""Rules of the house, read from the source."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("muser_wire", "muser_prefill", "muser_decode")
FORBIDDEN = {
    "muser_wire": {"torch", "triton", "mlx", "fastapi", "starlette", "uvicorn", "muser_prefill", "muser_decode"},
    "muser_prefill": {"mlx", "fastapi", "starlette", "uvicorn", "muser_decode"},
    "muser_decode": {"torch", "triton", "muser_prefill"},
}
PEERS = {"transformers", "mlx_lm", "llama_cpp", "vllm"}
# `muser model verify` runs these in processes of their own, where the user has installed the library.
ORACLES = {"muser_prefill/oracle.py": {"transformers"}, "muser_decode/oracle.py": {"mlx_lm"}}
MAX_LINES = 400
MAX_FUNCTION_LINES = 40


def modules(package: str) -> list[Path]:
    """The hand-written modules of a package; `stubs` is generated."""
    return [path for path in sorted((ROOT / package).rglob("*.py")) if path.name not in generated()]


def generated() -> set[str]:
    return {path.name for path in (ROOT / "muser_wire" / "stubs").glob("*_pb2.py")}


def imported(source: str) -> Iterator[str]:
    """Every module named by an import statement, wherever it stands, and by importlib.import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield str(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
            "import_module",
            "__import__",
        }:
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def top_level(names: Iterator[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def parametrize_modules() -> pytest.MarkDecorator:
    cases = [(package, path) for package in PACKAGES for path in modules(package)]
    return pytest.mark.parametrize(("package", "path"), cases, ids=[str(path.relative_to(ROOT)) for _, path in cases])


def test_the_reader_of_imports_sees_every_form() -> None:
    source = "import a.b, c\ndef f():\n  from d.e import g\n  importlib.import_module('h.i')\n  __import__('j')\n"
    assert top_level(imported(source)) == {"a", "c", "d", "h", "j"}


METRICS = {f"{package}/metrics.py" for package in PACKAGES}


def test_prometheus_is_known_to_one_module_of_each_package() -> None:
    paths = [path for package in PACKAGES for path in modules(package)]
    knowing = {path for path in paths if "prometheus_client" in top_level(imported(path.read_text()))}
    assert {str(path.relative_to(ROOT)) for path in knowing} == METRICS


def test_every_package_has_modules() -> None:
    assert all(len(modules(package)) > 1 for package in PACKAGES)


@parametrize_modules()
def test_imports_go_down_only(package: str, path: Path) -> None:
    allowed = ORACLES.get(str(path.relative_to(ROOT)), set())
    assert not top_level(imported(path.read_text())) & (FORBIDDEN[package] | PEERS) - allowed


def test_nothing_imports_an_oracle() -> None:
    oracles = {name.removesuffix(".py").replace("/", ".") for name in ORACLES}
    assert not oracles & {
        name for package in PACKAGES for path in modules(package) for name in imported(path.read_text())
    }


@parametrize_modules()
def test_modules_are_small_or_say_why(package: str, path: Path) -> None:
    source = path.read_text()
    if source.count("\n") > MAX_LINES:
        assert "lines" in (ast.get_docstring(ast.parse(source)) or ""), (
            f"over {MAX_LINES} lines without a reason at its top"
        )


@parametrize_modules()
def test_functions_are_short(package: str, path: Path) -> None:
    functions = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: lines for f in functions if (lines := code_lines(f)) > MAX_FUNCTION_LINES}
    assert not long


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) else None
    doc_lines = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - doc_lines


@parametrize_modules()
def test_every_module_says_what_it_is(package: str, path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@parametrize_modules()
def test_no_assert_in_product_code(package: str, path: Path) -> None:
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts


@parametrize_modules()
def test_broad_except_only_at_a_task_s_outermost_loop(package: str, path: Path) -> None:
    lines = path.read_text().splitlines()
    broad = [
        node.lineno
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node.type)
    ]
    unexplained = [number for number in broad if "outermost" not in " ".join(lines[max(0, number - 2) : number + 1])]
    assert not unexplained


def catches_everything(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in {"Exception", "BaseException"}) for name in names
    )


def test_folders_are_nouns_of_the_architecture() -> None:
    banned = re.compile(r"^_?(utils?|helpers?|common|managers?|misc)$")
    names = {
        part
        for package in PACKAGES
        for path in modules(package)
        for part in path.relative_to(ROOT).with_suffix("").parts
    }
    assert not [name for name in names if banned.match(name)]


def requirements_of(distribution: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """What an installed distribution needs on this platform, with these of its extras."""
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(distribution: str, extras: frozenset[str]) -> set[str]:
    """Every distribution that an install of `distribution[extras]` brings, by the installed metadata."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(distribution, extras)]
    while todo:
        item = todo.pop()
        if item not in seen:
            seen.add(item)
            todo += requirements_of(*item)
    return {name for name, _ in seen}


@pytest.mark.parametrize(
    ("extra", "brings", "without"),
    [
        ("decode", {"mlx", "fastapi"}, {"torch", "triton"}),
        ("prefill", {"torch"}, {"mlx", "mlx-cpu", "mlx-metal", "fastapi", "starlette"}),
        ("", {"grpcio", "gguf"}, {"torch", "mlx", "mlx-cpu", "fastapi"}),
    ],
)
def test_an_extra_brings_its_own_node_s_libraries_only(extra: str, brings: set[str], without: set[str]) -> None:
    names = closure("muser", frozenset({extra} - {""}))
    assert brings <= names
    assert not names & without


LOAD_AND_NAME = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(*sorted(set(sys.argv[2].split(",")) & sys.modules.keys()))
"""


def test_the_ground_floor_loads_neither_engine() -> None:
    """Import every module in a fresh process, in case one arrives through a third library."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("muser_wire")]
    command = [sys.executable, "-c", LOAD_AND_NAME, ",".join(names), ",".join(FORBIDDEN["muser_wire"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_stubs_are_what_the_schema_gives(tmp_path: Path) -> None:
    protoc = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        "proto",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    schemas = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "proto").rglob("*.proto"))]
    subprocess.run([*protoc, *schemas], check=True, cwd=ROOT)
    fresh = {path.name: path.read_text() for path in tmp_path.rglob("*_pb2.py*")}
    assert fresh
    for name, text in fresh.items():
        relative = re.sub(r"^from muser\.v1 import", "from muser_wire.stubs import", text, flags=re.MULTILINE)
        assert (ROOT / "muser_wire" / "stubs" / name).read_text() == relative, "run `make proto`"
