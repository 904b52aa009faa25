from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.identities import Digest
from muser_wire.kvpack import departed
from muser_wire.kvpack.departed import DEPARTED_FILE, Departure, Departures, read_departed
from muser_wire.kvpack.files import Files


def digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def test_the_last_reason_counts_by_name_and_by_what_was_continued(tmp_path: Path) -> None:
    departures = Departures(Files(tmp_path))
    departures.note(digest(1), digest(9), Departure.EVICTED)
    departures.note(digest(2), digest(9), Departure.DAMAGED)
    departures.note(digest(1), digest(9), Departure.STRANDED)
    for seen in (departures, Departures(Files(tmp_path))):
        assert seen.why(digest(1)) is Departure.STRANDED
        assert seen.why(digest(2)) is Departure.DAMAGED
        assert seen.why(digest(3)) is None
        assert seen.after(digest(9)) is Departure.STRANDED
        assert seen.after(digest(8)) is None


def test_the_list_is_bounded_in_memory_and_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed, "MAX_DEPARTED", 10)
    departures = Departures(Files(tmp_path))
    for number in range(100):
        departures.note(digest(number), digest(0), Departure.EVICTED)
        assert len((tmp_path / DEPARTED_FILE).read_bytes().splitlines()) <= 20
    assert departures.why(digest(89)) is None
    assert all(departures.why(digest(number)) for number in range(90, 100))
    assert all(Departures(Files(tmp_path)).why(digest(number)) for number in range(90, 100))


def test_a_list_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    known = f"{digest(1).hex()} {digest(2).hex()} EVICTED"
    lines = ["", "zz zz EVICTED", f"{digest(1).hex()} {digest(2).hex()} LATER", "\x00\xff", known, known[:90]]
    (tmp_path / DEPARTED_FILE).write_bytes("\n".join(lines).encode("latin-1"))
    (only,) = read_departed(Files(tmp_path))
    assert (only.name, only.reason) == (digest(1), Departure.EVICTED)
    nowhere = Departures(Files(tmp_path / "none"))
    nowhere.note(digest(1), digest(2), Departure.EVICTED)
    assert nowhere.why(digest(1)) is Departure.EVICTED
