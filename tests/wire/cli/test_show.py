from __future__ import annotations

import io

import pytest

from muser_wire.cli.ask import Answer
from muser_wire.cli.show import Wrapped, answers_table, bold


def wrap(pieces: list[str], width: int) -> str:
    out = io.StringIO()
    printer = Wrapped(out, width)
    for piece in pieces:
        printer.write(piece)
    printer.finish()
    return out.getvalue()


def test_words_go_to_the_next_line_whole() -> None:
    assert wrap(["The quick brown fox"], 13) == "  The quick\n  brown fox\n"


def test_pieces_may_end_inside_a_word() -> None:
    assert wrap(["The qu", "ick bro", "wn fox"], 13) == wrap(["The quick brown fox"], 13)


def test_a_word_wider_than_the_line_is_cut() -> None:
    assert wrap(["abcdefghij"], 6) == "  abcd\n  efgh\n  ij\n"


def test_line_ends_are_kept() -> None:
    assert wrap(["a\n\nb"], 20) == "  a\n\n  b\n"


@pytest.mark.parametrize("width", range(4, 40))
def test_no_line_is_wider_than_asked_and_no_word_is_lost(width: int) -> None:
    text = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor"
    printed = wrap(list(text), width)
    assert max(map(len, printed.splitlines())) <= width
    assert "".join(printed.split()) == "".join(text.split())


def test_headings_are_plain_when_not_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert bold("x", io.StringIO()) == "x"
    assert bold("x", Terminal()) == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert bold("x", Terminal()) == "x"


def test_the_table_reads_the_node_s_figures_and_has_a_dash_for_the_others() -> None:
    account = {
        "route": "remote",
        "timings": {"prefill_s": 1.23456, "wire_s": 0.5, "first_token_s": None, "tokens_per_second": 15.04},
        "payload_bytes": 12345678,
        "segments_verified": 30,
    }
    answers = [Answer("x", account, {"prompt_tokens": 412, "completion_tokens": 64}), Answer("x")]
    assert [line.split() for line in answers_table(["one", "two"], answers)] == [
        ["one", "two"],
        ["route", "remote", "unknown"],
        ["prompt", "tokens", "412", "-"],
        ["generated", "tokens", "64", "-"],
        ["prefill", "1.235", "s", "-"],
        ["wire", "0.500", "s", "-"],
        ["first", "token", "-", "-"],
        ["decode", "15.0", "tokens/s", "-"],
        ["payload", "bytes", "12,345,678", "-"],
        ["verified", "segments", "30", "-"],
    ]


def test_the_table_s_columns_are_aligned() -> None:
    lines = answers_table(["both nodes", "prefill node killed"], [Answer("x"), Answer("x")])
    assert {len(line) for line in lines} == {2 + 20 + 2 + len("both nodes") + 2 + len("prefill node killed")}
