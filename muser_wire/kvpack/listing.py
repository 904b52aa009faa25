"""A cache directory seen from outside: what lies in it, whether it is sound, what it holds of a prompt.

Works beside a running node, without its model and without its lock; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, BlockHead
from muser_wire.kvpack.container import LENGTH_NBYTES, check_file, decode_head, drops_rows, header_nbytes
from muser_wire.kvpack.disk import KEY_FILE, SUFFIX
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.files import FileFacts, Files
from muser_wire.kvpack.index import common_tokens


@dataclass(frozen=True)
class Listed:
    """One block's file. `whole`: no layer dropped a row, so that a prompt may part from it inside."""

    facts: FileFacts
    state: Digest
    head: BlockHead
    whole: bool


@dataclass(frozen=True)
class Unreadable:
    """A file that is no sound block; `reason` says why."""

    facts: FileFacts
    reason: str


@dataclass(frozen=True)
class HeldPrefix:
    """How many leading tokens of a prompt one state's blocks hold, in how many blocks, and why no more."""

    state: Digest
    tokens: int
    blocks: int
    reason: str


def list_blocks(files: Files) -> tuple[list[Listed], list[Unreadable]]:
    """Return the blocks of a directory by state, depth and name, and the files that are none; planes are not read.

    Raises:
        OSError: the directory cannot be read.
    """
    listed, unreadable = [], []
    for facts in _block_files(files):
        try:
            listed.append(_listed(files, facts))
        except (BlockInvalid, OSError) as error:
            unreadable.append(Unreadable(facts, str(error)))
    return sorted(listed, key=lambda block: (block.state, block.head.start, block.head.name)), unreadable


def check_blocks(files: Files) -> Iterator[tuple[FileFacts, str]]:
    """Read every file in full; yield each with what is wrong with it, or an empty text.

    Raises:
        OSError: the store's key or its directory cannot be read.
    """
    key = files.read(KEY_FILE)
    for facts in _block_files(files):
        reason = ""
        try:
            name = check_file(key, files.read(facts.name))
            if name.hex() not in facts.name:
                reason = "it lies under another block's name"
        except (BlockInvalid, OSError) as error:
            reason = str(error)
        yield facts, reason


def explain(blocks: list[Listed], ids: bytes) -> list[HeldPrefix]:
    """Return, for each state, how much of a prompt (packed ids) its blocks hold and why no more."""
    states = sorted({block.state for block in blocks})
    return [_held([block for block in blocks if block.state == state], state, ids) for state in states]


def _held(blocks: list[Listed], state: Digest, ids: bytes) -> HeldPrefix:
    parents = {block.head.name for block in blocks}
    # What begins at position 0 names a parent that is no block.
    level = [block for block in blocks if block.head.start == 0 and block.head.parent not in parents]
    at, count = 0, 0
    while at * ID_NBYTES < len(ids):
        best, tokens = _best(level, ids[at * ID_NBYTES :])
        if best is None:
            return HeldPrefix(state, at, count, f"no block holds token {at}" if not level else _why(level, ids, at))
        at, count = at + tokens, count + 1
        if tokens < best.head.tokens and at * ID_NBYTES < len(ids):
            return HeldPrefix(state, at, count, f"the prompt differs at token {at}")
        level = [block for block in blocks if block.head.parent == best.head.name]
    return HeldPrefix(state, at, count, "all held")


def _best(level: list[Listed], rest: bytes) -> tuple[Listed | None, int]:
    wanted = np.frombuffer(rest, dtype="<u4")
    best: Listed | None = None
    most = 0
    for block in level:
        tokens = common_tokens(block.head.token_ids, wanted)
        if tokens > most and (block.whole or tokens == block.head.tokens):
            best, most = block, tokens
    return best, most


def _why(level: list[Listed], ids: bytes, at: int) -> str:
    wanted = np.frombuffer(ids[at * ID_NBYTES :], dtype="<u4")
    common = max(common_tokens(block.head.token_ids, wanted) for block in level)
    if common == 0:
        return f"the prompt differs at token {at}"
    return f"the prompt differs at token {at + common}, inside a block whose windows allow to go on at its end only"


def _block_files(files: Files) -> list[FileFacts]:
    return sorted((facts for facts in files.list() if facts.name.endswith(SUFFIX)), key=lambda facts: facts.name)


def _listed(files: Files, facts: FileFacts) -> Listed:
    length = LENGTH_NBYTES + header_nbytes(files.read_start(facts.name, LENGTH_NBYTES))
    header = files.read_start(facts.name, length)[LENGTH_NBYTES:]
    head, state, tokens = decode_head(header)
    ids = files.read_start(facts.name, length + tokens * ID_NBYTES)[length:]
    if tokens < 1 or len(ids) != tokens * ID_NBYTES:
        raise BlockInvalid("the file is cut short")
    return Listed(facts, state, replace(head, ids=ids), not drops_rows(header))
