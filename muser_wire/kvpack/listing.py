"""A cache directory seen from outside: what lies in it, whether it is sound, what it holds of a prompt.

Works beside a running node, without its model and without its lock; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, BlockHead
from muser_wire.kvpack.container import LENGTH_NBYTES, check_file, decode_head, header_nbytes
from muser_wire.kvpack.departed import Departures
from muser_wire.kvpack.disk import FORMAT_DIRECTORY, FORMAT_PREFIX, KEY_FILE, SUFFIX
from muser_wire.kvpack.errors import BlockInvalid
from muser_wire.kvpack.explaining import BlockAccount, Explainer
from muser_wire.kvpack.files import FileFacts, Files
from muser_wire.kvpack.index import Index
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.states import StateFacts, read_states


@dataclass(frozen=True)
class Listed:
    """One block's file."""

    facts: FileFacts
    state: Digest
    head: BlockHead


@dataclass(frozen=True)
class Unreadable:
    """A file that is no sound block; `reason` says why."""

    facts: FileFacts
    reason: str


@dataclass(frozen=True)
class HeldPrefix:
    """What the blocks of one state hold of a prompt, block by block."""

    facts: StateFacts
    accounts: tuple[BlockAccount, ...]

    @property
    def tokens(self) -> int:
        """How many leading tokens are held."""
        return sum(account.held for account in self.accounts)

    @property
    def reason(self) -> str:
        """Why there are no more."""
        return next((account.reason for account in self.accounts if account.reason), "all held")


def list_blocks(files: Files) -> tuple[list[Listed], list[Unreadable]]:
    """Return the blocks of a directory by state, depth and name, and the files that are none; planes are not read.

    Raises:
        OSError: the directory cannot be read.
    """
    listed, unreadable = [], []
    for facts in _block_files(files):
        try:
            listed.append(_listed(files, facts))
        except FileNotFoundError:
            # The node beside us has evicted it meanwhile.
            continue
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
        except FileNotFoundError:
            continue
        except (BlockInvalid, OSError) as error:
            reason = str(error)
        yield facts, reason


def explain(files: Files, ids: bytes) -> list[HeldPrefix]:
    """Return, for each state that the directory describes, what its blocks hold of a prompt (packed ids).

    Raises:
        OSError: the store's key or its directory cannot be read.
    """
    key, departures = files.read(KEY_FILE), Departures(files)
    blocks, _ = list_blocks(files)
    prefixes = []
    for facts in read_states(files):
        namer = Namer(key, facts.identities, facts.computed)
        index = Index(namer, facts.geometry, reuse_decoded=True)
        # By depth, so that each block comes after the one that it continues.
        for block in blocks:
            if block.state == facts.state and index.rooted(block.head.parent):
                index.add(block.head)
        accounts = Explainer(namer, index, departures, lambda name: "disk").accounts(ids)
        prefixes.append(HeldPrefix(facts, tuple(accounts)))
    return prefixes


def ignored_stores(files: Files) -> list[str]:
    """Return the names of the stores beside this one that another version of the format made."""
    try:
        found = [path.name for path in files.directory.parent.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(name for name in found if name.startswith(FORMAT_PREFIX) and name != FORMAT_DIRECTORY)


def _block_files(files: Files) -> list[FileFacts]:
    return sorted((facts for facts in files.list() if facts.name.endswith(SUFFIX)), key=lambda facts: facts.name)


def _listed(files: Files, facts: FileFacts) -> Listed:
    length = LENGTH_NBYTES + header_nbytes(files.read_start(facts.name, LENGTH_NBYTES))
    header = files.read_start(facts.name, length)[LENGTH_NBYTES:]
    head, state, tokens = decode_head(header)
    ids = files.read_start(facts.name, length + tokens * ID_NBYTES)[length:]
    if tokens < 1 or len(ids) != tokens * ID_NBYTES:
        raise BlockInvalid("the file is cut short")
    return Listed(facts, state, replace(head, ids=ids))
