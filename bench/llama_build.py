"""llama.cpp's own server, which no package of the registry brings compiled."""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.driver import CONSTRAINTS, PeerUnavailable, peer_python, succeeds

TOOLS = ("cmake>=3.28,<5", "ninja")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    # One file that can be moved, without a page, which the build would fetch, and without TLS.
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}


def built_llama_server(venv: Path, release: str) -> Path:
    """Return `llama-server` in the peers' environment; compiles it, which takes minutes, where it is not there yet.

    Its sources are those that a release of llama-cpp-python carries, so the two peers are one version of llama.cpp.

    Args:
        venv: the peers' environment.
        release: the requirement that names the release, without extras.

    Raises:
        PeerUnavailable: a step failed; its output is on standard error.
    """
    binary = venv / "bin" / "llama-server"
    if binary.exists():
        return binary
    python = peer_python(venv, TOOLS)
    print(f"compiling llama-server from {release}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        pip = [str(python), "-m", "pip", "download", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
        _run(*pip, "--no-deps", "--no-binary", ":all:", "--dest", str(folder), release)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as sources:
            sources.extractall(folder, filter="data")
        source, build = next(folder.glob("*/vendor/llama.cpp")), folder / "build"
        cmake, ninja = python.with_name("cmake"), python.with_name("ninja")
        options = [f"-D{name}={value}" for name, value in {**OPTIONS, "CMAKE_MAKE_PROGRAM": ninja}.items()]
        _run(str(cmake), "-G", "Ninja", "-S", str(source), "-B", str(build), *options)
        _run(str(cmake), "--build", str(build), "--target", "llama-server")
        # Under its name only when it is whole.
        whole = shutil.copy2(build / "bin" / "llama-server", binary.with_suffix(".new"))
        Path(whole).replace(binary)
    return binary


def _run(*command: str) -> None:
    if not succeeds(*command):
        raise PeerUnavailable(f"{command[0]} failed, see above")
