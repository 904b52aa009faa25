from __future__ import annotations

from pathlib import Path

import pytest
from kvpack_support import FULL, WIDE, identities

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.naming import state_digest
from muser_wire.kvpack.states import StateFacts, read_states, write_state


@pytest.mark.parametrize("geometry", [FULL, WIDE])
def test_what_is_written_is_read_again(geometry: Geometry, tmp_path: Path) -> None:
    facts = StateFacts(identities(), geometry, "f32 dense")
    write_state(Files(tmp_path), facts)
    assert list(read_states(Files(tmp_path))) == [facts]
    assert facts.state == state_digest(identities(), "f32 dense")
    assert (tmp_path / f"state-{facts.state.hex()[:16]}.json").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"spec_digest": Digest(b"x" * 32)}, "spec_digest"),
        ({"tokenizer_digest": Digest(b"x" * 32)}, "tokenizer_digest"),
        ({"lane": "reference"}, "lane"),
        ({"chunk_tokens": 16}, "chunk_tokens"),
    ],
)
def test_differences_are_named(change: dict[str, object], name: str) -> None:
    facts = StateFacts(identities(), FULL, "")
    assert facts.differences(StateFacts(identities(**change), FULL, "")) == [name]
    assert facts.differences(StateFacts(identities(), FULL, "other")) == ["computed"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"identities": {}}', "\x00"])
def test_a_file_that_describes_nothing_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "state-0000000000000000.json").write_text(text)
    assert list(read_states(Files(tmp_path))) == []


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_state(Files(tmp_path / "none"), StateFacts(identities(), FULL, ""))
