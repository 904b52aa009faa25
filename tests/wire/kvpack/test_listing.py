from __future__ import annotations

from pathlib import Path

import pytest
from kvpack_support import FULL, SLIDING, Shelf, identities

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.listing import check_blocks, explain, list_blocks

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


@pytest.mark.parametrize("geometry", [FULL, SLIDING])
@pytest.mark.parametrize("common", range(21))
def test_explain_says_what_the_node_would_hold(
    geometry: Geometry, common: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)
    store = shelf(tmp_path, geometry)
    ids = pack_ids([*IDS[:common], 1, 2, 3])
    (held,) = explain(list_blocks(store.files)[0], ids)
    assert held.tokens == store.store.explain(ids).tokens
    assert held.reason


def test_explain_gives_a_reason_that_can_be_acted_on(tmp_path: Path) -> None:
    listed, _ = list_blocks(shelf(tmp_path, SLIDING).files)
    (held,) = explain(listed, pack_ids([*IDS[:11], 1]))
    assert held.reason == "the prompt differs at token 11, inside a block whose windows allow to go on at its end only"
    (held,) = explain(listed, pack_ids([1, 2]))
    assert held.reason == "the prompt differs at token 0"
    (held,) = explain(listed, pack_ids([*IDS, 1, 2]))
    assert (held.tokens, held.reason) == (20, "no block holds token 20")
    (held,) = explain(listed, pack_ids(IDS))
    assert (held.tokens, held.blocks, held.reason) == (20, 3, "all held")


def test_states_are_explained_apart_and_damage_is_named(tmp_path: Path) -> None:
    first = shelf(tmp_path)
    second = Shelf(tmp_path, FULL, 0, PLENTY)
    second.identities = identities(weights_digest=Digest(b"x" * 32))
    second.reopen()
    second.keep(IDS[:8])
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    listed, unreadable = list_blocks(first.files)
    assert sorted(held.tokens for held in explain(listed, pack_ids(IDS))) == [8, 20]
    assert [(file.facts.name, file.reason) for file in unreadable] == [
        ("cut.safetensors", "the file has no safetensors header")
    ]
