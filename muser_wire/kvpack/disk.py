"""Blocks on disk: published whole or not at all, checked when loaded, bounded in bytes, kept over restarts.

One directory serves several models in turn: a file's name begins with the state that it belongs to, and only
files of this node's own state are ever read. The bound counts all of them, and whatever was used least
recently leaves first. One process at a time uses a directory. A directory of another format is another
directory, so it is ignored and not misread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack.block import ID_NBYTES, Block, BlockHead
from muser_wire.kvpack.container import LENGTH_NBYTES, decode, decode_head, encode, header_nbytes
from muser_wire.kvpack.departed import Departure, Departures
from muser_wire.kvpack.errors import BlockInvalid, StoreLocked, StoreUnusable
from muser_wire.kvpack.files import FileFacts, Files
from muser_wire.kvpack.naming import KEY_NBYTES, NAME_NBYTES, Namer, random_key
from muser_wire.kvpack.states import STATE_CHARS

FORMAT_PREFIX = "kvpack-"
FORMAT_DIRECTORY = f"{FORMAT_PREFIX}1"
KEY_FILE = "key"
LOCK_FILE = "lock"
SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A file that the tier knows. `head` is None when it belongs to another state, or was never looked into."""

    file: str
    nbytes: int
    used_ns: int
    head: BlockHead | None

    @property
    def order(self) -> tuple[int, int]:
        """Sorts what leaves first before the rest: by last use, and of one chain the deepest first."""
        return self.used_ns, -self.head.start if self.head else 0


@dataclass(frozen=True)
class Saved:
    """Whether a block was published, and which own blocks left to make room."""

    done: bool
    evicted: list[Digest]


@dataclass
class DiskCounts:
    """What happened since the start."""

    saved: int = 0
    loaded: int = 0
    invalid: int = 0
    evicted: int = 0
    failed_writes: int = 0


class DiskTier:
    """The blocks of one directory. Methods may be called on any thread; `save` works on one at a time."""

    def __init__(self, files: Files, namer: Namer, geometry: Geometry, bound_nbytes: int) -> None:
        self.files = files
        self._namer = namer
        self._geometry = geometry
        self._bound_nbytes = bound_nbytes
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._stored: dict[str, Stored] = {}
        self.counts = DiskCounts()
        self.departures = Departures(files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files that count against the bound."""
        with self._lock:
            return sum(stored.nbytes for stored in self._stored.values())

    @property
    def newest_ns(self) -> int:
        """When any file was last used, as far as is known; 0 without one."""
        with self._lock:
            return max((stored.used_ns for stored in self._stored.values()), default=0)

    def scan(self) -> list[BlockHead]:
        """Look through the directory; return the heads of this state's blocks, parents before children.

        Left-over partial files are deleted, and so are files of this state that cannot be what they say, or
        that no chain from position 0 leads to.

        Raises:
            StoreUnusable: the directory cannot be read.
        """
        try:
            found = self.files.list()
        except OSError as error:
            raise unusable(self.files.directory, error) from error
        heads = []
        for facts in found:
            if facts.name.endswith(PARTIAL_SUFFIX):
                self._delete(facts.name)
            elif facts.name.endswith(SUFFIX):
                head = self._read_head(facts)
                heads += [head] if head else []
        return self._rooted(heads)

    def save(self, block: Block, used_ns: int) -> Saved:
        """Publish a block that was used at `used_ns`, unless files at least as new would have to leave for it."""
        with self._saving:
            return self._save(block, used_ns)

    def load(self, head: BlockHead) -> Block | None:
        """Return a block, verified in full; None when that fails, and then its file is gone, or it was evicted."""
        file = self.file_name(head.name)
        try:
            block = decode(self._geometry, self._namer, head, self.files.read(file))
        except (OSError, BlockInvalid) as error:
            with self._lock:
                if isinstance(error, FileNotFoundError) and file not in self._stored:
                    return None
            _log.warning("block_invalid name=%s reason=%s", head.name.hex()[:16], error)
            self.drop(head.name)
            with self._lock:
                self.counts.invalid += 1
            return None
        with self._lock:
            self.counts.loaded += 1
        return block

    def drop(self, name: Digest) -> None:
        """Forget and delete a block."""
        self._delete(self.file_name(name))

    def touch(self, names: Iterable[Digest], used_ns: int) -> None:
        """Note that blocks were used."""
        for name in names:
            file = self.file_name(name)
            with self._lock:
                stored = self._stored.get(file)
                if stored is not None:
                    self._stored[file] = replace(stored, used_ns=used_ns)
            if stored is not None:
                # Only the order over a restart suffers when this fails.
                with contextlib.suppress(OSError):
                    self.files.touch(file, used_ns)

    def file_name(self, name: Digest) -> str:
        """Return under which name a block of this state lies in the directory."""
        return f"{self._namer.state.hex()[:STATE_CHARS]}-{name.hex()}{SUFFIX}"

    def _save(self, block: Block, used_ns: int) -> Saved:
        parts = encode(self._geometry, self._namer, block)
        nbytes = sum(len(part) for part in parts)
        file = self.file_name(block.head.name)
        victims = self._victims(nbytes, used_ns, replaced=file)
        if victims is None:
            return Saved(False, [])
        for victim in victims:
            self._delete(victim.file)
        evicted = [victim.head.name for victim in victims if victim.head]
        try:
            self._publish(file, parts)
            self.files.touch(file, used_ns)
        except OSError as error:
            _log.warning("block_not_saved name=%s reason=%s", block.head.name.hex()[:16], error)
            self._delete(file)
            with self._lock:
                self.counts.failed_writes += 1
            return Saved(False, evicted)
        with self._lock:
            self.counts.saved += 1
            self._stored[file] = Stored(file, nbytes, used_ns, block.head)
        return Saved(True, evicted)

    def _victims(self, nbytes: int, used_ns: int, replaced: str) -> list[Stored] | None:
        """Return what must leave so that `nbytes` fit; None when only what is in use now could make room."""
        with self._lock:
            others = [stored for stored in self._stored.values() if stored.file != replaced]
            excess = sum(stored.nbytes for stored in others) + nbytes - self._bound_nbytes
            victims: list[Stored] = []
            for stored in sorted(others, key=lambda stored: stored.order):
                if excess <= 0:
                    break
                if stored.used_ns >= used_ns:
                    return None
                victims.append(stored)
                excess -= stored.nbytes
            if excess > 0:
                return None
            self.counts.evicted += len(victims)
            return victims

    def _publish(self, file: str, parts: tuple[bytes, memoryview]) -> None:
        partial = file + PARTIAL_SUFFIX
        try:
            self.files.write(partial, parts)
            self.files.rename(partial, file)
            self.files.sync()
        except OSError:
            self._delete(partial)
            raise

    def _delete(self, file: str) -> None:
        with self._lock:
            self._stored.pop(file, None)
        try:
            self.files.delete(file)
        except OSError as error:
            _log.warning("file_not_deleted file=%s reason=%s", file, error)

    def _read_head(self, facts: FileFacts) -> BlockHead | None:
        """Take a file into account; return its head when it is this state's and names itself rightly."""
        head = None
        if facts.name.startswith(self._namer.state.hex()[:STATE_CHARS]):
            try:
                head = read_head(self.files, self._namer, facts.name)
            except (OSError, BlockInvalid) as error:
                _log.warning("block_invalid file=%s reason=%s", facts.name, error)
                self.counts.invalid += 1
                self._delete(facts.name)
                self._note_damage(facts.name)
                return None
        self._stored[facts.name] = Stored(facts.name, facts.nbytes, facts.used_ns, head)
        return head

    def _rooted(self, heads: list[BlockHead]) -> list[BlockHead]:
        """Return the heads that a chain from position 0 leads to; the others' files are deleted."""
        reached, kept = {self._namer.root}, []
        for head in sorted(heads, key=lambda head: head.start):
            if head.parent in reached:
                reached.add(head.name)
                kept.append(head)
            else:
                self.departures.note(head.name, head.parent, Departure.STRANDED)
                self.drop(head.name)
        return kept

    def _note_damage(self, file: str) -> None:
        """Remember that a file of this state was none, by the name under which it lay."""
        with contextlib.suppress(ValueError):
            name = bytes.fromhex(file.removesuffix(SUFFIX).partition("-")[2])
            if len(name) == NAME_NBYTES:
                self.departures.note(Digest(name), Digest(bytes(NAME_NBYTES)), Departure.DAMAGED)


def read_head(files: Files, namer: Namer, file: str) -> BlockHead:
    """Return the head of a block file of this state, with its ids. The planes are not read.

    Raises:
        BlockInvalid: the file is not a block of this state, or does not lie under its own name.
        OSError: it cannot be read.
    """
    length = LENGTH_NBYTES + header_nbytes(files.read_start(file, LENGTH_NBYTES))
    data = files.read_start(file, length + namer.chunk_tokens * ID_NBYTES)
    head, state, tokens = decode_head(data[LENGTH_NBYTES:length])
    ids = data[length : length + tokens * ID_NBYTES]
    if state != namer.state or not 0 < tokens <= namer.chunk_tokens or len(ids) != tokens * ID_NBYTES:
        raise BlockInvalid("the header is not that of a block of this state")
    if head.start < 0 or head.start % namer.chunk_tokens or namer.name(head.parent, head.start, ids) != head.name:
        raise BlockInvalid("its tokens do not give its name")
    if head.name.hex() not in file:
        raise BlockInvalid("it lies under another block's name")
    return replace(head, ids=ids)


def read_key(files: Files) -> bytes:
    """Return the store's own key, made and kept when there is none yet.

    Raises:
        StoreUnusable: it cannot be read or written.
    """
    try:
        files.prepare()
        with contextlib.suppress(FileNotFoundError):
            key = files.read(KEY_FILE)
            if len(key) == KEY_NBYTES:
                return key
        key = random_key()
        files.write(KEY_FILE + PARTIAL_SUFFIX, [key])
        files.rename(KEY_FILE + PARTIAL_SUFFIX, KEY_FILE)
        files.sync()
    except OSError as error:
        raise unusable(files.directory, error) from error
    return key


@contextlib.contextmanager
def locked(files: Files) -> Iterator[None]:
    """Hold a directory for this process.

    Raises:
        StoreLocked: another process holds it.
        StoreUnusable: it cannot be made or locked.
    """
    with contextlib.ExitStack() as stack:
        try:
            files.prepare()
            held = stack.enter_context(files.lock(LOCK_FILE))
        except OSError as error:
            raise unusable(files.directory, error) from error
        if not held:
            raise StoreLocked(f"{files.directory} is in use by another process: stop it, or name another directory")
        yield


def store_files(cache_directory: Path) -> Files:
    """Return the files of this format's store under a cache directory."""
    return Files(cache_directory / FORMAT_DIRECTORY)


def unusable(directory: Path, error: OSError) -> StoreUnusable:
    """Return the error that says why a directory cannot serve."""
    return StoreUnusable(f"{directory}: {error.strerror or error}")
