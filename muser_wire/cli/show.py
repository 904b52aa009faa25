"""What the commands print: streamed text wrapped to the terminal, and tables. Plain when nobody watches."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from muser_wire.cli.ask import Answer, json_object

MAX_WIDTH = 80
"""Columns; wider lines are hard to read."""

LABEL_WIDTH = 20
"""Columns of a table's first column."""


def terminal_width() -> int:
    """Return how many columns a line may take."""
    return min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)


def bold(text: str, out: TextIO = sys.stdout) -> str:
    """Return `text` as a heading: bold on a terminal that wants it, plain elsewhere."""
    return f"\x1b[1m{text}\x1b[0m" if out.isatty() and "NO_COLOR" not in os.environ else text


class Wrapped:
    """Text that arrives in pieces, printed at once and broken between words.

    A word that has begun waits for its end, so that it can go to the next line whole.
    """

    def __init__(self, out: TextIO, width: int, indent: str = "  ") -> None:
        self._out = out
        self._width = width
        self._indent = indent
        self._column = 0
        self._gap = False
        self._word = ""

    def write(self, piece: str) -> None:
        """Take some text; print the words that it completes."""
        for char in piece:
            if char.isspace():
                self._flush_word()
                self._gap = True
            else:
                self._word += char
            if char == "\n":
                self._newline()
        self._out.flush()

    def finish(self) -> None:
        """Print what waits, and end the line."""
        self._flush_word()
        if self._column:
            self._newline()
        self._out.flush()

    def _flush_word(self) -> None:
        if self._word and self._gap and self._column:
            if self._column + 1 + len(self._word) > self._width:
                self._newline()
            else:
                self._put(" ")
        while self._word:
            if not self._column:
                self._put(self._indent)
            room = max(1, self._width - self._column)
            self._put(self._word[:room])
            self._word = self._word[room:]
            if self._word:
                self._newline()
        self._gap = False

    def _newline(self) -> None:
        self._out.write("\n")
        self._column = 0

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._column += len(text)


@dataclass(frozen=True)
class Row:
    """A line of the answers' table: its label, and how its value is read from an answer."""

    label: str
    value: Callable[[Answer], str]


def timing(name: str, digits: int, unit: str) -> Callable[[Answer], str]:
    """Return the reader of one of the node's timings; a dash where it has none."""

    def read(answer: Answer) -> str:
        value = json_object(answer.account, "timings").get(name)
        return f"{value:.{digits}f}{unit}" if isinstance(value, int | float) else "-"

    return read


def count(source: str, name: str) -> Callable[[Answer], str]:
    """Return the reader of a whole number in the answer's `account` or `usage`, with thousands apart."""

    def read(answer: Answer) -> str:
        value = (answer.account if source == "account" else answer.usage).get(name)
        return f"{value:,}" if isinstance(value, int) else "-"

    return read


ROWS = (
    Row("route", lambda answer: answer.route),
    Row("prompt tokens", count("usage", "prompt_tokens")),
    Row("generated tokens", count("usage", "completion_tokens")),
    Row("prefill", timing("prefill_s", 3, " s")),
    Row("wire", timing("wire_s", 3, " s")),
    Row("first token", timing("first_token_s", 3, " s")),
    Row("decode", timing("tokens_per_second", 1, " tokens/s")),
    Row("payload bytes", count("account", "payload_bytes")),
    Row("verified segments", count("account", "segments_verified")),
)


def answers_table(headings: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    """Return the lines of a table with one column for each answer."""
    columns = [
        [heading, *(row.value(answer) for row in ROWS)] for heading, answer in zip(headings, answers, strict=True)
    ]
    labels = ["", *(row.label for row in ROWS)]
    widths = [max(len(cell) for cell in column) for column in columns]
    return [
        "  "
        + label.ljust(LABEL_WIDTH)
        + "".join("  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, *cells in zip(labels, *columns, strict=True)
    ]
