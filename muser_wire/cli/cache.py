"""`muser cache`: what a decode node keeps on disk of prompts that were computed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from muser_wire.cli import endpoint
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.departed import DEPARTED_FILE
from muser_wire.kvpack.disk import PARTIAL_SUFFIX, SUFFIX, locked, store_files, unusable
from muser_wire.kvpack.files import Files
from muser_wire.kvpack.listing import (
    HeldPrefix,
    Listed,
    Unreadable,
    check_blocks,
    explain,
    ignored_stores,
    list_blocks,
)
from muser_wire.kvpack.states import STATE_PREFIX
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tokenizer import load_tokenizer

EXIT_DAMAGED = 1
NAME_CHARS = 16


class CacheInputError(WireError):
    """What was to be explained cannot be read. The message says why."""

    code = "cache_input"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser cache` and its subcommands."""
    parser = commands.add_parser("cache", help="list, check, explain and clear the prompts that are kept on disk")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("ls", run_ls, "list the blocks: state, block, tokens, bytes, last use"),
        ("stats", run_stats, "sum up blocks, tokens and bytes for each state"),
        ("verify", run_verify, "read every block in full and name what is damaged; status 1 if anything is"),
        ("clear", run_clear, "delete every block; refused while a node uses the directory"),
        ("explain", run_explain, "say how much of a prompt is held, and why no more"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("--dir", type=Path, help="the node's --cache-dir; default: kvpack in MUSER_HOME")
        action.set_defaults(run=run)
        if name in ("ls", "stats", "explain"):
            action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "explain":
            action.add_argument(
                "--request",
                metavar="FILE",
                help="ask the running node about the body of a chat or completion, or a JSON list of token ids; "
                "-: standard input",
            )
            endpoint.add_arguments(action)
            action.add_argument(
                "--ids", default="-", help="without a node: file with a JSON list of token ids; -: standard input"
            )
            action.add_argument("--model", help="without a node: a model, to read plain text instead of ids")


def run_ls(arguments: argparse.Namespace) -> int:
    """Print one line for each block."""
    blocks, unreadable = _list(_files(arguments))
    if arguments.json:
        print(json.dumps({"blocks": [_row(block) for block in blocks]}, indent=2))
    for block in () if arguments.json else blocks:
        row = _row(block)
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(block.facts.used_ns / 1e9))
        mark = f"  decoded from {block.head.decoded_from}" if block.head.decoded_from is not None else ""
        print(f"{row['state']}  {row['name']}  {row['start']}-{row['stop']}  {row['nbytes']:,} bytes  {used}{mark}")
    for file in unreadable:
        print(f"muser: {file.facts.name}: {file.reason}", file=sys.stderr)
    return 0


def run_stats(arguments: argparse.Namespace) -> int:
    """Print counts and sizes for each state, and of all."""
    blocks, unreadable = _list(_files(arguments))
    counts, tokens, nbytes, deepest = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for block in blocks:
        state = block.state.hex()[:NAME_CHARS]
        counts[state] += 1
        tokens[state] += block.head.tokens
        nbytes[state] += block.facts.nbytes
        deepest[state] = max(deepest[state], block.head.stop)
    states = {
        state: {
            "blocks": counts[state],
            "tokens": tokens[state],
            "nbytes": nbytes[state],
            "deepest_token": deepest[state],
        }
        for state in sorted(counts)
    }
    if arguments.json:
        print(json.dumps({"states": states, "unreadable_files": len(unreadable)}, indent=2))
        return 0
    for state, facts in states.items():
        print(
            f"{state}  {facts['blocks']} blocks  {facts['tokens']:,} tokens  {facts['nbytes']:,} bytes  "
            f"deepest at token {facts['deepest_token']:,}"
        )
    print(f"in all: {sum(counts.values())} blocks, {sum(nbytes.values()):,} bytes, {len(unreadable)} unreadable files")
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Check every byte of every block; a node deletes a damaged one when it meets it."""
    files, damaged, checked = _files(arguments), 0, 0
    try:
        for facts, reason in check_blocks(files) if files.directory.is_dir() else ():
            checked += 1
            if reason:
                damaged += 1
                print(f"{facts.name}: {reason}")
    except OSError as error:
        raise unusable(files.directory, error) from error
    print(f"{checked} blocks read, {damaged} damaged")
    return EXIT_DAMAGED if damaged else 0


def run_clear(arguments: argparse.Namespace) -> int:
    """Delete every block, of every model."""
    files, count = _files(arguments), 0
    if files.directory.is_dir():
        with locked(files):
            try:
                for facts in files.list():
                    if facts.name.endswith((SUFFIX, PARTIAL_SUFFIX)):
                        files.delete(facts.name)
                        count += 1
                    elif facts.name == DEPARTED_FILE or facts.name.startswith(STATE_PREFIX):
                        files.delete(facts.name)
                files.sync()
            except OSError as error:
                raise unusable(files.directory, error) from error
    print(f"{count} files deleted")
    return 0


def run_explain(arguments: argparse.Namespace) -> int:
    """Print how much of a prompt is held, block by block: by the running node, or by what each state has on disk."""
    if arguments.request is not None:
        return _explain_by_node(arguments)
    ids, files = _read_ids(arguments), _files(arguments)
    held = _explain_by_files(files, ids)
    if arguments.json:
        rows = [
            {
                **prefix.facts.named(),
                "state": prefix.facts.state.hex()[:NAME_CHARS],
                "held_tokens": prefix.tokens,
                "reason": prefix.reason,
                "blocks": [asdict(account) for account in prefix.accounts],
            }
            for prefix in held
        ]
        print(
            json.dumps({"prompt_tokens": len(ids), "states": rows, "ignored_stores": ignored_stores(files)}, indent=2)
        )
        return 0
    for prefix in held:
        named = prefix.facts.named()
        print(
            f"{prefix.facts.state.hex()[:NAME_CHARS]}  weights {named['weights_digest']}, lane {named['lane']},",
            end=" ",
        )
        print(f"grid {named['chunk_tokens']}, {named['computed']}: {prefix.tokens} of {len(ids) - 1} tokens held")
        _print_blocks([asdict(account) for account in prefix.accounts])
    if not held:
        print("no blocks are kept here")
    _print_ignored(ignored_stores(files))
    return 0


def _explain_by_files(files: Files, ids: list[int]) -> list[HeldPrefix]:
    """Return what each state on disk holds of a prompt."""
    if not files.directory.is_dir():
        return []
    try:
        # A node leaves the last prompt token to its first decode step.
        return explain(files, pack_ids(ids[:-1]))
    except FileNotFoundError:
        # No node has made the store's key yet.
        return []
    except OSError as error:
        raise unusable(files.directory, error) from error


def _explain_by_node(arguments: argparse.Namespace) -> int:
    """Print what the running node says of a request."""
    asked = _read_json(arguments.request)
    body = {"tokens": asked} if isinstance(asked, list) else asked
    if not isinstance(body, dict):
        raise CacheInputError(f"{arguments.request}: expected the body of a request, or a JSON list of token ids")
    answer = endpoint.endpoint(arguments).explain_cache(body)
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"{answer.get('held_tokens')} of {answer.get('prompt_tokens')} prompt tokens held: {answer.get('reason')}")
    _print_blocks(_objects(answer.get("blocks")))
    for other in _objects(answer.get("elsewhere")):
        differs = ", ".join(f"{name} ({other.get(name)})" for name in _texts(other.get("differs")))
        print(f"  {other.get('held_tokens')} tokens are held of another state on disk, which differs in {differs}")
    _print_ignored(_texts(answer.get("ignored_stores")))
    return 0


def _print_blocks(blocks: list[dict[str, object]]) -> None:
    for block in blocks:
        where = f"hit in {block['where']}" if block["held"] else "miss"
        mark = ", in part decoded" if block["decoded"] else ""
        reason = f": {block['reason']}" if block["reason"] else ""
        print(f"  tokens {block['start']}-{block['stop']}: {block['held']} held, {where}{mark}{reason}")


def _print_ignored(stores: list[str]) -> None:
    for store in stores:
        print(f"  {store} beside it was made by another version, and is ignored")


def _objects(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _files(arguments: argparse.Namespace) -> Files:
    return store_files(arguments.dir or muser_home() / "kvpack")


def _list(files: Files) -> tuple[list[Listed], list[Unreadable]]:
    if not files.directory.is_dir():
        return [], []
    try:
        return list_blocks(files)
    except OSError as error:
        raise unusable(files.directory, error) from error


def _row(block: Listed) -> dict[str, object]:
    return {
        "state": block.state.hex()[:NAME_CHARS],
        "name": block.head.name.hex()[:NAME_CHARS],
        "start": block.head.start,
        "stop": block.head.stop,
        "nbytes": block.facts.nbytes,
        "used_s": round(block.facts.used_ns / 1e9, 3),
        "decoded_from": block.head.decoded_from,
    }


def _read_ids(arguments: argparse.Namespace) -> list[int]:
    """Return the token ids that the arguments name.

    Raises:
        CacheInputError: they cannot be read, or are no ids.
    """
    if arguments.model:
        return load_tokenizer(fetched_path(arguments.model, muser_home())).encode(_read(arguments.ids))
    ids = _read_json(arguments.ids)
    if not isinstance(ids, list) or not ids or not all(type(item) is int and 0 <= item < 1 << 32 for item in ids):
        raise CacheInputError(f"{arguments.ids}: expected a JSON list of token ids, such as [1, 2, 3]")
    return ids


def _read(name: str) -> str:
    """Return the text of a file, or of standard input.

    Raises:
        CacheInputError: it cannot be read.
    """
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CacheInputError(f"{name}: {error}") from error


def _read_json(name: str) -> object:
    """Return the JSON value in a file, or of standard input.

    Raises:
        CacheInputError: it cannot be read, or is none.
    """
    text = _read(name)
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CacheInputError(f"{name}: {error}") from error
    return value
