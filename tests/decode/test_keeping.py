from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path

import pytest
from kvpack_support import FULL, blocks_of, identities

from muser_decode.client import Consumer
from muser_decode.keeping import CacheSizes, open_keeper
from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.errors import StoreLocked
from muser_wire.model.checkpoint import open_checkpoint

IDS = list(range(20))
MEGABYTE = 1_000_000


@pytest.fixture
def consumer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Consumer:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)
    return Consumer(open_checkpoint(tiny_llama).spec, identities(), FULL)


def kept(consumer: Consumer, directory: Path, computed: str = "f32 dense", *, save: bool = False) -> int:
    """Open the store, perhaps save a request; return how many of its tokens are held."""
    with open_keeper(CacheSizes(0, MEGABYTE, directory), consumer, computed) as keeper:
        assert keeper is not None
        for block in blocks_of(keeper.store.namer, FULL, IDS) if save else ():
            assert keeper.store.put(block)
        return keeper.store.match(pack_ids(IDS)).tokens


def test_nothing_is_opened_when_both_tiers_are_off(consumer: Consumer, tmp_path: Path) -> None:
    with open_keeper(CacheSizes(0, 0, tmp_path / "x"), consumer, "") as keeper:
        assert keeper is None
    assert not (tmp_path / "x").exists()


def test_memory_alone_makes_no_directory(consumer: Consumer, tmp_path: Path) -> None:
    with open_keeper(CacheSizes(MEGABYTE, 0, tmp_path / "x"), consumer, "") as keeper:
        assert keeper is not None
    assert not (tmp_path / "x").exists()


def test_the_disk_is_found_again_by_the_same_node_only(consumer: Consumer, tmp_path: Path) -> None:
    assert kept(consumer, tmp_path, save=True) == 20
    assert kept(consumer, tmp_path) == 20
    assert kept(consumer, tmp_path, "bf16 packed") == 0
    unqualified = dataclasses.replace(consumer, allow_unqualified=True)
    assert kept(unqualified, tmp_path) == 0, "what a producer with other weights may have made is apart"
    assert kept(consumer, tmp_path) == 20


@pytest.mark.parametrize("package", ["muser", "mlx"])
def test_what_another_version_computed_is_ignored_where_no_rules_say_every_byte(
    package: str, consumer: Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = dataclasses.replace(consumer, identities=identities(lane="reference"))
    assert kept(consumer, tmp_path, save=True) == kept(exact, tmp_path, save=True) == 20
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "999.0" if name == package else version(name))
    assert kept(consumer, tmp_path) == 0
    assert kept(exact, tmp_path) == 20


def test_a_directory_in_use_is_refused_by_name(consumer: Consumer, tmp_path: Path) -> None:
    sizes = CacheSizes(0, MEGABYTE, tmp_path)
    with (
        open_keeper(sizes, consumer, ""),
        pytest.raises(StoreLocked, match=str(tmp_path)),
        open_keeper(sizes, consumer, ""),
    ):
        pass
