from __future__ import annotations

from pathlib import Path

import pytest
from kvpack_support import FULL, SLIDING, Shelf

from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.store import BlockStore

A = list(range(100, 120))
PLENTY = 1 << 20
BLOCK = 8 * 2 * 2 * 8
"""Bytes of eight tokens: two layers, keys and values, 8 bytes a row."""


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


def rows(store: BlockStore, ids: list[int]) -> list[tuple[int, str, str]]:
    """What each account says: tokens held, where, and the reason."""
    return [(account.held, account.where, account.reason) for account in store.accounts(pack_ids(ids))]


def test_hits_name_their_tier_and_the_place_where_a_prompt_differs(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    shelf.keep(A)
    assert rows(shelf.store, A) == [(8, "memory", ""), (8, "memory", ""), (4, "memory", "")]
    assert rows(shelf.store, [*A[:11], 1, 2]) == [(8, "memory", ""), (3, "memory", "differs at token 11")]
    assert rows(shelf.store, [*A, 1]) == [
        (8, "memory", ""),
        (8, "memory", ""),
        (4, "memory", "nothing held goes beyond token 20"),
    ]
    assert rows(shelf.store, [*A[:8], 1, 2]) == [(8, "memory", ""), (0, "", "differs at token 8")]
    shelf.reopen()
    assert rows(shelf.store, A[:9]) == [(8, "disk", ""), (1, "disk", "")]


def test_what_was_never_seen_says_so_for_each_block(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, 0)
    assert rows(shelf.store, A) == [
        (0, "", "never seen"),
        (0, "", "the one before it is not held"),
        (0, "", "the one before it is not held"),
    ]


def test_a_window_that_allows_no_way_in_is_named(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, SLIDING, PLENTY, 0)
    shelf.keep(A)
    reason = "differs at token 11, inside a block whose windows allow to go on at its end only"
    assert rows(shelf.store, [*A[:11], 1]) == [(8, "memory", ""), (0, "", reason)]


def test_what_was_evicted_says_so_in_memory(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 2 * BLOCK, 0)
    shelf.keep(A[:16])
    shelf.keep(list(range(200, 216)))
    assert rows(shelf.store, A[:16]) == [(0, "", "evicted for newer blocks")] * 2
    assert rows(shelf.store, A[:16])[0] == rows(shelf.store, A[:17])[0]


def test_what_was_evicted_from_disk_says_so_after_a_restart(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, 2500)
    shelf.keep(A[:16])
    shelf.keep(list(range(200, 216)))
    for _ in range(2):
        assert rows(shelf.store, A[:16]) == [(0, "", "evicted for newer blocks")] * 2
        shelf.reopen()


@pytest.mark.parametrize("noticed", ["when loaded", "at the start"])
def test_what_failed_a_check_says_so(noticed: str, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.keep(A[:8])
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"?" if noticed == "when loaded" else data[:40])
    if noticed == "when loaded":
        assert shelf.take(A[:8]) == 0
    shelf.reopen()
    assert rows(shelf.store, A[:8]) == [(0, "", "failed a check and was deleted")]
    shelf.keep(A[:8])
    assert rows(shelf.store, A[:8]) == [(8, "disk", "")]


def test_what_lost_the_block_before_it_says_so(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.keep(A[:16])
    first = min(tmp_path.glob("*.safetensors"), key=lambda file: b'"start":"0"' not in file.read_bytes())
    first.unlink()
    shelf.reopen()
    assert rows(shelf.store, A[:16]) == [(0, "", "never seen"), (0, "", "deleted with the block before it")]


def test_what_decode_produced_is_marked_and_the_policy_named(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    shelf.keep(A, decoded_from=12)
    assert [account.decoded for account in shelf.store.accounts(pack_ids(A))] == [False, True, True]
    careful = BlockStore(shelf.namer, FULL, PLENTY, shelf.disk, reuse_decoded=False)
    assert rows(careful, A) == [
        (8, "disk", ""),
        (4, "disk", "decode produced the rest, which the policy leaves alone"),
        (0, "", "held, but the one before it is not"),
    ]


def test_too_few_tokens_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 12)
    shelf = Shelf(tmp_path, FULL, PLENTY, 0)
    shelf.keep(A)
    assert rows(shelf.store, [*A[:5], 1, 2])[0] == (0, "", "only 5 tokens are held")
