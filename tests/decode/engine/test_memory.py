from __future__ import annotations

import os
from pathlib import Path

import pytest

from muser_decode.engine.memory import CacheMemory, container_nbytes, default_nbytes, machine_nbytes

GIB = 1 << 30


def test_what_is_taken_is_bounded_and_comes_back() -> None:
    memory = CacheMemory(100)
    assert memory.take(60)
    assert not memory.take(41)
    assert memory.take(40)
    assert memory.free_nbytes == 0
    memory.give_back(60)
    assert memory.free_nbytes == 60
    assert memory.take(60)


def test_what_is_kept_gives_way_and_may_grow_again() -> None:
    told: list[int] = []
    memory = CacheMemory(100, told.append)
    memory.take(70)
    memory.take(40)
    memory.give_back(70)
    assert told == [30, 100]


@pytest.mark.parametrize(
    ("machine", "loaded", "expected"),
    [(24 * GIB, GIB, 20 * GIB), (4 * GIB, GIB, 2 * GIB), (2 * GIB, 2 * GIB, 0), (64 * GIB, 16 * GIB, 40 * GIB)],
)
def test_a_machine_s_share_leaves_an_eighth_or_one_gib(machine: int, loaded: int, expected: int) -> None:
    assert default_nbytes(machine, loaded) == expected


def test_a_container_s_limit_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    assert container_nbytes(limit) is None
    limit.write_text("max\n")
    assert container_nbytes(limit) is None
    limit.write_text("1073741824\n")
    assert container_nbytes(limit) == GIB
    monkeypatch.setattr("muser_decode.engine.memory.CGROUP_LIMIT", limit)
    assert machine_nbytes() == GIB
    monkeypatch.setattr("muser_decode.engine.memory.CGROUP_LIMIT", tmp_path / "none")
    assert machine_nbytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > GIB


def test_a_gpu_has_a_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muser_decode.engine.memory.on_gpu", lambda: True)
    monkeypatch.setattr(
        "muser_decode.engine.memory.mx.device_info", lambda: {"max_recommended_working_set_size": 48 * GIB}
    )
    assert machine_nbytes() == 48 * GIB
