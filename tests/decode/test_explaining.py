from __future__ import annotations

from pathlib import Path

import pytest
from kvpack_support import FULL, Shelf, identities

from muser_decode.explaining import explain_held
from muser_decode.keeper import Keeper
from muser_wire.identities import Digest
from muser_wire.kvpack import index
from muser_wire.kvpack.disk import FORMAT_DIRECTORY

IDS = list(range(100, 121))
PLENTY = 1 << 20


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


def test_the_last_prompt_token_is_not_looked_for(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, 0)
    shelf.keep(IDS, decoded_from=18)
    answer = explain_held(Keeper(shelf.store), IDS)
    assert (answer["prompt_tokens"], answer["held_tokens"], answer["reason"]) == (21, 20, "all held")
    assert answer["blocks"] == [
        {"start": 0, "stop": 8, "held": 8, "where": "memory", "decoded": False, "reason": ""},
        {"start": 8, "stop": 16, "held": 8, "where": "memory", "decoded": False, "reason": ""},
        {"start": 16, "stop": 20, "held": 4, "where": "memory", "decoded": True, "reason": ""},
    ]
    assert (answer["elsewhere"], answer["ignored_stores"]) == ([], [])


def test_other_states_on_disk_and_other_stores_are_named(tmp_path: Path) -> None:
    directory = tmp_path / FORMAT_DIRECTORY
    (tmp_path / "kvpack-0").mkdir()
    other = Shelf(directory, FULL, 0, PLENTY)
    other.identities = identities(lane="reference", weights_digest=Digest(b"x" * 32))
    other.reopen()
    other.describe()
    other.keep(IDS[:16])
    shelf = Shelf(directory, FULL, 0, PLENTY)
    shelf.describe()
    answer = explain_held(Keeper(shelf.store), IDS)
    assert (answer["held_tokens"], answer["reason"]) == (0, "never seen")
    assert answer["ignored_stores"] == ["kvpack-0"]
    (elsewhere,) = answer["elsewhere"]  # type: ignore[misc]
    assert (elsewhere["held_tokens"], elsewhere["differs"]) == (16, ["lane", "weights_digest"])
    assert elsewhere["lane"] == "reference"


def test_a_node_that_keeps_nothing_says_so() -> None:
    answer = explain_held(None, IDS)
    assert (answer["held_tokens"], answer["blocks"]) == (0, [])
    assert answer["reason"] == "nothing is kept: memory and disk are both 0 MB"
