"""What the documents point at is there: links, make targets, commands and their options."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".pytest_cache", "node_modules", "build"}
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not SKIPPED.intersection(path.relative_to(ROOT).parts)
    and not path.relative_to(ROOT).parts[0].startswith(".venv")
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE = re.compile(r"\bmake ([a-z]+)\b")
COMMAND = re.compile(r"\b(muser(?:-prefill|-decode)?) ([a-z]+(?: [^`\n|#;]*)?)$")
CLAUSE = re.compile(r"\[([1-9]\d*\.[1-9]\d*)\]")
PROGRAMS = {
    "muser": "muser_wire.cli.__main__",
    "muser-prefill": "muser_prefill.config",
    "muser-decode": "muser_decode.config",
}
"""Where each program declares its command line. A node's `config` loads neither torch nor MLX."""


def code_spans(text: str) -> Iterator[str]:
    """The contents of inline code and of fenced blocks, in no order."""
    yield from re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    yield from re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each `muser...` command line in code, as program and words."""
    for span in code_spans(text):
        for line in span.splitlines():
            if match := COMMAND.match(re.split(r"\s*[|#;]", line.strip())[0]):
                yield match[1], match[2].split()


def anchors(text: str) -> set[str]:
    """The fragments that a document's headings give."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def unknown_word(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    """The first subcommand or option of a documented command line that the parser does not have."""
    while (choices := subparsers(parser)) and words:
        if words[0] not in choices:
            return words[0]
        parser, words = choices[words[0]], words[1:]
    options = set(parser._option_string_actions)
    return next((word for word in words if word.startswith("--") and word.partition("=")[0] not in options), None)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def parser_of(program: str) -> argparse.ArgumentParser:
    return cast("argparse.ArgumentParser", importlib.import_module(PROGRAMS[program]).parser())


documents = pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])


def test_the_readers_find_what_they_look_for() -> None:
    text = "# A b, c\nsee [x](y.md#z) and `make demo`\n```sh\nmuser model fetch smollm2   # once\n```\n"
    text += "`muser-decode serve --port 0`"
    assert LINK.findall(text) == ["y.md#z"]
    assert MAKE.findall("\n".join(code_spans(text))) == ["demo"]
    assert list(commands(text)) == [
        ("muser", ["model", "fetch", "smollm2"]),
        ("muser-decode", ["serve", "--port", "0"]),
    ]
    assert anchors(text) == {"a-b-c"}


def test_an_unknown_word_is_found_at_every_depth() -> None:
    parser = argparse.ArgumentParser()
    serve = parser.add_subparsers().add_parser("serve")
    serve.add_argument("--port")
    assert unknown_word(parser, ["serve", "--port", "1"]) is None
    assert unknown_word(parser, ["server"]) == "server"
    assert unknown_word(parser, ["serve", "--prot=1"]) == "--prot=1"


@documents
def test_links_resolve(path: Path) -> None:
    for link in LINK.findall(path.read_text()):
        target, _, fragment = link.partition("#")
        if "://" in target:
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), link
        assert not fragment or fragment in anchors(there.read_text()), link


@documents
def test_make_targets_exist(path: Path) -> None:
    named = set(MAKE.findall("\n".join(code_spans(path.read_text()))))
    assert named <= make_targets()


@documents
def test_commands_and_options_exist(path: Path) -> None:
    for program, words in commands(path.read_text()):
        assert unknown_word(parser_of(program), words) is None, f"{program} {' '.join(words)}"


def test_every_target_says_what_it_does() -> None:
    described = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert described == make_targets()


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "adr"
    records = {path.name for path in folder.glob("[0-9]*.md")}
    assert records == set(LINK.findall((folder / "README.md").read_text()))


def test_every_cited_clause_is_in_the_protocol() -> None:
    clauses = set(re.findall(r"^(\d+\.\d+) ", (ROOT / "docs" / "protocol.md").read_text(), flags=re.MULTILINE))
    sources = [*(ROOT / "proto").rglob("*.proto"), *ROOT.glob("muser_*/**/*.py")]
    cited = {(clause, path.name) for path in sources for clause in CLAUSE.findall(path.read_text())}
    assert len(clauses) > 10
    assert len(cited) > 10
    assert sorted((clause, name) for clause, name in cited if clause not in clauses) == []


def screen_lines(text: str, columns: int = 100) -> int:
    """How many lines a text takes on a screen of so many columns."""
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


def test_the_quick_starts_of_one_and_of_two_machines_fit_two_screens() -> None:
    readme = (ROOT / "README.md").read_text()
    one, two = (readme.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in ("One machine", "Two machines"))
    for heading, command in ((one, "make serve"), (two, "muser pair listen")):
        assert command in heading
    assert screen_lines(one + two) <= 2 * 45
    assert len(readme.splitlines()) <= 120


@documents
def test_documents_name_no_path_of_one_machine(path: Path) -> None:
    assert not re.search(r"/(root|work|tmp|home|Users)/", path.read_text())
