from __future__ import annotations

from pathlib import Path

import pytest
from kvpack_support import FULL, SLIDING, Shelf, identities

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.disk import store_files
from muser_wire.kvpack.files import FileFacts, Files
from muser_wire.kvpack.listing import check_blocks, explain, ignored_stores, list_blocks
from muser_wire.kvpack.states import read_states

IDS = list(range(60, 80))
PLENTY = 1 << 20


def shelf(path: Path, geometry: Geometry = FULL) -> Shelf:
    shelf = Shelf(path, geometry, 0, PLENTY)
    shelf.keep(IDS, decoded_from=17)
    return shelf


def test_blocks_are_listed_by_depth_without_their_model(tmp_path: Path) -> None:
    listed, unreadable = list_blocks(shelf(tmp_path).files)
    assert [(block.head.start, block.head.stop, block.head.decoded_from) for block in listed] == [
        (0, 8, None),
        (8, 16, None),
        (16, 20, 17),
    ]
    assert [block.head.token_ids.tolist() for block in listed] == [IDS[:8], IDS[8:16], IDS[16:]]
    assert unreadable == []


@pytest.mark.parametrize("at", range(0, 1200, 41))
def test_any_flipped_byte_is_found_without_the_model(at: int, tmp_path: Path) -> None:
    files = shelf(tmp_path).files
    assert [reason for _, reason in check_blocks(files)] == ["", "", ""]
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    data = bytearray(victim.read_bytes())
    data[at % len(data)] ^= 1
    victim.write_bytes(data)
    found = {facts.name: reason for facts, reason in check_blocks(files)}
    assert [name for name, reason in found.items() if reason] == [victim.name]


class Evicting(Files):
    """Files of a node that evicts one as soon as all are listed."""

    def list(self) -> list[FileFacts]:
        listed = super().list()
        next(self.directory.glob("*.safetensors")).unlink()
        return listed


def test_a_file_that_a_running_node_evicts_meanwhile_is_neither_damaged_nor_listed(tmp_path: Path) -> None:
    shelf(tmp_path)
    assert [reason for _, reason in check_blocks(Evicting(tmp_path))] == ["", ""]
    listed, unreadable = list_blocks(Evicting(tmp_path))
    assert (len(listed), unreadable) == (1, [])


@pytest.mark.parametrize("geometry", [FULL, SLIDING])
@pytest.mark.parametrize("common", range(21))
def test_explain_says_what_the_node_would_hold(
    geometry: Geometry, common: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)
    store = shelf(tmp_path, geometry)
    store.describe()
    ids = pack_ids([*IDS[:common], 1, 2, 3])
    (held,) = explain(store.files, ids)
    assert held.tokens == store.store.explain(ids).tokens
    assert [account.stop for account in held.accounts] == [*range(8, common + 3, 8), common + 3]
    assert held.reason


def test_states_are_explained_apart_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)
    first = shelf(tmp_path)
    facts = [first.describe()]
    second = Shelf(tmp_path, FULL, 0, PLENTY)
    second.identities = identities(weights_digest=Digest(b"x" * 32))
    second.reopen()
    facts.append(second.describe())
    second.keep(IDS[:8])
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    (tmp_path / "state-0123456789abcdef.json").write_text("{}")
    held = {prefix.facts.state: prefix.tokens for prefix in explain(first.files, pack_ids(IDS))}
    assert held == {facts[0].state: 20, facts[1].state: 8}
    assert facts[0].differences(facts[1]) == ["weights_digest"]
    _, unreadable = list_blocks(first.files)
    assert [(file.facts.name, file.reason) for file in unreadable] == [
        ("cut.safetensors", "the file has no safetensors header")
    ]


def test_a_state_whose_file_says_something_else_is_not_believed(tmp_path: Path) -> None:
    store = shelf(tmp_path)
    facts = store.describe()
    assert list(read_states(store.files)) == [facts]
    file = tmp_path / facts.file
    file.write_text(file.read_text().replace('"native"', '"other"'))
    assert list(read_states(store.files)) == []


def test_stores_of_other_versions_are_named(tmp_path: Path) -> None:
    files = store_files(tmp_path)
    files.prepare()
    for name in ("kvpack-0", "kvpack-2", "other"):
        (tmp_path / name).mkdir()
    assert ignored_stores(files) == ["kvpack-0", "kvpack-2"]
    assert ignored_stores(store_files(tmp_path / "none")) == []
