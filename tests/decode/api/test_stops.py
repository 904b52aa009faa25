from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muser_decode.api.stops import StopMatcher


def fed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece) for piece in pieces]
    return [*out, matcher.finish()], matcher.matched


def first_complete(text: str, stops: list[str]) -> int | None:
    """Read one character at a time; at the first that completes a stop string, return where it began."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "matched"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["so", "me EN", "D more"], ["so", "me ", "", ""], True),
        (["END"], ["E", "N", "X"], ["", "", "ENX", ""], False),
        (["END"], ["the E"], ["the ", "E"], False),
        (["aab"], ["aa", "ab"], ["", "a", ""], True),
        (["\n\n"], ["x\n", "y\n", "\nz"], ["x", "\ny", "", ""], True),
        (["abcd", "bc"], ["abcd"], ["a", ""], True),
        (["bc", "abc"], ["xabc"], ["x", ""], True),
        (["x"], ["x"], ["", ""], True),
        (["stop"], ["stop", "after"], ["", "", ""], True),
        (["é"], ["caf", "é au lait"], ["caf", "", ""], True),
    ],
)
def test_text_before_the_first_stop_string(
    stops: list[str], pieces: list[str], expected: list[str], matched: bool
) -> None:
    assert fed(stops, pieces) == (expected, matched)


small_texts = st.text(alphabet="ab", max_size=4)


@given(st.lists(small_texts.filter(bool), max_size=4), st.lists(small_texts, max_size=8))
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    cut = first_complete(whole, stops)
    out, matched = fed(stops, pieces)
    assert ("".join(out), matched) == (whole[:cut], cut is not None)


@given(st.lists(small_texts.filter(bool), min_size=1, max_size=4), st.lists(small_texts, max_size=8))
def test_what_was_shown_is_never_taken_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.feed(piece)
        # Nothing that may still become a stop string is shown, and nothing else is held.
        held = seen[len(shown) :]
        assert matcher.matched or held == "" or any(stop.startswith(held) and stop != held for stop in stops)
