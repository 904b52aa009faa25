from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_backend import LocalBackend, local_backend, served


@dataclass(frozen=True)
class Served:
    """A node's address, and what it has behind its door."""

    url: str
    backend: LocalBackend


@pytest.fixture(scope="session")
def node(tiny_llama: Path) -> Iterator[Served]:
    with local_backend(tiny_llama, max_queue=64) as backend, served(backend) as url:
        yield Served(url, backend)
