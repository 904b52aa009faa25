"""Fixtures and rules for every test."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from muser_decode.blas import load_blas

# All tests multiply with what the nodes multiply with: torch with its own BLAS, which it keeps where it is imported
# before another one is there for everybody, and mlx with OpenBLAS, which has to be there before mlx is imported.
load_blas()

# A gate must give the same verdict twice; examples are derived from the test, and time is pytest-timeout's business.
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=20_000)
hypothesis.settings.load_profile(os.environ.get("MUSER_HYPOTHESIS", "gate"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random llama checkpoint in the Hugging Face layout. Read it, never write it."""
    from muser_wire.model.tiny import write_tiny_llama

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The fetched SmolLM2-135M-Instruct GGUF. Its absence is a failure: a skip would hide the real weights."""
    from muser_wire.home import muser_home
    from muser_wire.model.fetch import fetched_path

    path = fetched_path("smollm2", muser_home())
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make test`, or `muser model fetch smollm2` once", pytrace=False)
    return path


@pytest.fixture
def free_port() -> int:
    """A loopback TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@functools.cache
def has_cuda() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


@functools.cache
def has_metal() -> bool:
    """Whether MLX sees Apple's GPU."""
    if sys.platform != "darwin":
        return False
    import mlx.core as mx

    return mx.metal.is_available()


def pytest_configure() -> None:
    """Have Ctrl-C reach the nodes that tests start: a shell that runs the tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has no device for. The libraries are asked only when a test needs one."""
    for item in items:
        if item.get_closest_marker("cuda") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="cuda: no NVIDIA GPU here"))
        if item.get_closest_marker("metal") and not has_metal():
            item.add_marker(pytest.mark.skip(reason="metal: no Apple GPU here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests did not run, even when there are none."""
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"not run on this machine: {skipped} tests")
