from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpack_support import CHUNK, FULL, KEY, SLIDING, WIDE, Shelf, blocks_of, identities

from muser_wire.geometry import Geometry
from muser_wire.identities import Digest
from muser_wire.kvpack import index
from muser_wire.kvpack.block import pack_ids
from muser_wire.kvpack.disk import locked, read_key, store_files
from muser_wire.kvpack.errors import StoreLocked, StoreUnusable
from muser_wire.kvpack.naming import Namer
from muser_wire.kvpack.store import BlockStore, Tier

PLENTY = 1 << 20
A = list(range(100, 120))
GEOMETRIES = pytest.mark.parametrize("geometry", [FULL, SLIDING, WIDE], ids=["full", "sliding", "wide"])


@pytest.fixture(autouse=True)
def every_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)


@GEOMETRIES
@pytest.mark.parametrize("tiers", [(PLENTY, 0), (0, PLENTY), (PLENTY, PLENTY)], ids=["memory", "disk", "both"])
def test_the_longest_held_prefix_is_found_at_every_length(
    geometry: Geometry, tiers: tuple[int, int], tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path, geometry, *tiers)
    assert shelf.keep(A) == [True, True, True]
    for length in range(1, len(A) + 1):
        # A window shorter than a chunk can only be resumed at ends of blocks, but for a tail that fits it.
        inside = geometry is not SLIDING or length > 16
        assert shelf.take([*A[:length], 7, 7]) == (length if inside else length // CHUNK * CHUNK)


@GEOMETRIES
def test_a_prompt_that_differs_inside_a_block_goes_on_from_there_or_from_the_block_before(
    geometry: Geometry, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path, geometry, PLENTY, 0)
    shelf.keep(A)
    assert shelf.take([*A[:11], 1, 2, 3, 4, 5, 6]) == (8 if geometry is SLIDING else 11)
    assert shelf.store.explain(pack_ids([1, 2, 3])).reason == "nothing held goes beyond token 0"
    assert shelf.store.explain(pack_ids([*A[:8], *range(9)])).reason == "no block continues token 8"


def test_a_short_prefix_is_a_miss_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 12)
    shelf = Shelf(tmp_path, FULL, PLENTY, 0)
    shelf.keep(A)
    match = shelf.store.match(pack_ids([*A[:11], 1]))
    assert (match.blocks, match.tokens, match.reason) == ((), 0, "only 11 tokens are held")
    assert shelf.take([*A[:12], 1]) == 12


def test_blocks_outlive_a_restart_on_disk_only(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    shelf.keep(A)
    (first, *_) = shelf.store.match(pack_ids(A)).blocks
    fetched = shelf.store.fetch(first.head)
    assert fetched is not None
    assert fetched.tier is Tier.MEMORY
    shelf.reopen()
    fetched = shelf.store.fetch(first.head)
    assert fetched is not None
    assert fetched.tier is Tier.DISK
    assert shelf.take(A) == 20
    assert shelf.store.stats()["fetched_memory"] == 1, "what was read once stays in memory"


def test_a_longer_tail_takes_the_place_of_the_one_that_it_holds(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    for end in (18, 19, 20):
        shelf.keep(A[:end])
    assert shelf.store.stats()["blocks"] == 3
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    shelf.keep([*A, 1, 2, 3, 4, 5])
    assert shelf.store.stats()["blocks"] == 4, "two whole chunks, the third with what was a tail, and a new tail"


def test_a_block_without_its_parent_is_not_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    assert not shelf.store.put(blocks_of(shelf.namer, FULL, A)[1])
    assert shelf.store.stats()["orphans"] == 1
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_shared_beginning_outlives_the_chats_that_have_it(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 4 * 256, 0)
    system = A[:8]
    for chat in range(20):
        ids = [*system, *range(200 + 20 * chat, 216 + 20 * chat)]
        held = shelf.take(ids)
        assert held == (8 if chat else 0)
        shelf.keep(ids)
    assert shelf.store.stats()["memory_nbytes"] <= 4 * 256


def test_memory_that_others_need_is_given_up_and_the_disk_keeps_its_own(tmp_path: Path) -> None:
    memory, both = Shelf(tmp_path / "a", FULL, PLENTY, 0), Shelf(tmp_path / "b", FULL, PLENTY, PLENTY)
    for shelf in (memory, both):
        shelf.keep(A)
        shelf.store.bound_memory(256)
        assert shelf.store.stats()["memory_nbytes"] == 256
    assert memory.take([*A, 7]) == 8
    assert both.take([*A, 7]) == 20
    for shelf in (memory, both):
        shelf.store.bound_memory(0)
        assert shelf.store.stats()["memory_nbytes"] == 0
    assert memory.take([*A, 7]) == 0
    assert both.take([*A, 7]) == 20


def test_the_disk_s_bound_holds_and_the_files_are_what_is_counted(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, 4000)
    for chat in range(12):
        shelf.keep([*A[:8], *range(200 + 20 * chat, 216 + 20 * chat)])
        files = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
        assert files == shelf.store.stats()["disk_nbytes"]
        assert files <= 4000
    shelf.reopen()
    assert shelf.take([*A[:8], 1]) == 8


@GEOMETRIES
def test_what_decode_produced_is_marked_and_left_alone_where_the_policy_says_so(
    geometry: Geometry, tmp_path: Path
) -> None:
    shelf = Shelf(tmp_path, geometry, PLENTY, PLENTY)
    shelf.keep(A, decoded_from=12)
    shelf.reopen()
    match = shelf.store.match(pack_ids(A))
    assert [held.head.decoded_from for held in match.blocks] == [None, 12, 16]
    assert match.decoded
    assert not shelf.store.match(pack_ids(A[:12])).decoded, "the first tokens of the block come from prefill"
    careful = BlockStore(shelf.namer, geometry, PLENTY, shelf.disk, reuse_decoded=False)
    assert careful.match(pack_ids(A)).tokens == (8 if geometry is SLIDING else 12)
    shelf.keep(A[:16])
    assert [held.head.decoded_from for held in shelf.store.match(pack_ids(A)).blocks] == [None, None, 16]
    assert shelf.take(A) == 20
    shelf.keep(A, decoded_from=12)
    assert shelf.store.match(pack_ids(A[:16])).decoded is False, "what prefill produced is not replaced"
    shelf.reopen()
    assert shelf.take(A) == 20


def test_two_models_in_one_directory_do_not_meet_and_share_the_bound(tmp_path: Path) -> None:
    first = Shelf(tmp_path, FULL, 0, 6000)
    first.keep(A)
    second = Shelf(tmp_path, FULL, 0, 6000)
    second.identities = identities(weights_digest=Digest(b"x" * 32))
    second.reopen()
    assert second.take(A) == 0
    for chat in range(6):
        second.keep([*range(200 + 20 * chat, 216 + 20 * chat)])
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= 6000
    first.reopen()
    assert first.take(A) == 0, "the other model's were newer"


def test_a_file_under_another_s_name_or_of_another_format_is_never_served(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.keep(A)
    files = sorted(tmp_path.glob("*.safetensors"))
    data = [file.read_bytes() for file in files]
    for file, other in zip(files, [*data[1:], data[0]], strict=True):
        file.write_bytes(other)
    shelf.reopen()
    assert shelf.take(A) == 0
    assert not list(tmp_path.glob("*.safetensors"))
    for file, own in zip(files, data, strict=True):
        file.write_bytes(own.replace(b"muser kvpack 1", b"muser kvpack 2"))
    shelf.reopen()
    assert shelf.take(A) == 0


@pytest.mark.parametrize("at", range(0, 900, 37))
def test_a_flipped_byte_on_disk_is_a_miss_that_is_deleted_and_counted(at: int, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.keep(A[:8])
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 0x10
    file.write_bytes(data)
    assert shelf.take(A[:8]) == 0
    assert shelf.store.stats()["disk_invalid"] == 1
    assert not file.exists()
    assert shelf.keep(A[:8]) == [True], "and it can be saved again"
    assert shelf.take(A[:8]) == 8


@pytest.mark.parametrize("fault", ["enospc", "rename refused", "sync refused"])
def test_a_block_that_cannot_be_saved_leaves_no_file_and_no_error(fault: str, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.files.fault = fault
    assert shelf.keep(A[:8]) == [False]
    assert [path for path in tmp_path.iterdir() if path.name not in ("key", "lock", "departed")] == []
    assert shelf.store.accounts(pack_ids(A[:8]))[0].reason == "could not be saved on disk"
    assert shelf.store.stats()["disk_failed_writes"] == 1
    assert shelf.take(A[:8]) == 0
    assert shelf.keep(A[:8]) == [True]


def test_what_a_crash_left_half_written_is_swept(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors.partial").write_bytes(b"half")
    Shelf(tmp_path, FULL, 0, PLENTY)
    assert not list(tmp_path.glob("*.partial"))


def hold(directory: str, ready: multiprocessing.synchronize.Event, leave: multiprocessing.synchronize.Event) -> None:
    with locked(store_files(Path(directory))):
        ready.set()
        leave.wait(30)


def test_a_directory_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), ready, leave))
    process.start()
    assert ready.wait(30)
    with pytest.raises(StoreLocked, match="in use by another process"), locked(store_files(tmp_path)):
        pass
    process.kill()
    process.join()
    with locked(store_files(tmp_path)):
        pass


def test_the_key_is_made_once_and_is_this_user_s_alone(tmp_path: Path) -> None:
    files = store_files(tmp_path)
    key = read_key(files)
    assert len(key) == 32
    assert read_key(files) == key
    assert (files.directory / "key").stat().st_mode & 0o077 == 0
    assert files.directory.stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="Not a directory"):
        read_key(store_files(tmp_path / "file"))


def test_block_files_are_this_user_s_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        Shelf(tmp_path, FULL, 0, PLENTY).keep(A)
    finally:
        os.umask(umask)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.safetensors"))


FAULTS = [
    "enospc",
    "short write",
    "rename refused",
    "rename lost",
    "rename lost, noticed late",
    "sync refused",
    "read refused",
]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=28)
steps = st.one_of(
    st.tuples(st.just("keep"), prompts),
    st.tuples(st.just("keep a part"), prompts),
    st.tuples(st.just("keep, decoded"), prompts),
    st.tuples(st.just("take"), prompts),
    st.tuples(st.just("restart"), st.just([])),
    st.tuples(st.sampled_from(FAULTS), st.just([])),
    st.tuples(st.just("flip"), st.lists(st.integers(0, 1 << 16), min_size=2, max_size=2)),
    st.tuples(st.just("cut"), st.lists(st.integers(0, 1 << 16), min_size=2, max_size=2)),
)


def damage(directory: Path, step: str, numbers: list[int]) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if files:
        file = files[numbers[0] % len(files)]
        data = bytearray(file.read_bytes())
        if step == "flip" and data:
            data[numbers[1] % len(data)] ^= 1 << numbers[0] % 8
        file.write_bytes(data if step == "flip" else data[: numbers[1] % (len(data) + 1)])


@GEOMETRIES
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(steps, min_size=3, max_size=25),
    st.sampled_from([0, 300, 700, PLENTY]),
    st.sampled_from([0, 2500, 6000, PLENTY]),
)
def test_no_interleaving_of_requests_restarts_and_faults_gives_a_wrong_byte(
    geometry: Geometry,
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, list[int]]],
    memory_nbytes: int,
    disk_nbytes: int,
) -> None:
    """`take` checks every byte that the store serves; bounds hold after each step, and in the end all can be kept."""
    directory = tmp_path_factory.mktemp("store")
    shelf = Shelf(directory, geometry, memory_nbytes, disk_nbytes)
    for step, numbers in plan:
        if step == "restart":
            shelf.reopen()
        elif step in ("flip", "cut"):
            damage(directory, step, numbers)
        elif step in FAULTS:
            shelf.files.fault = step
        elif step == "take":
            shelf.take(numbers)
        elif step == "keep a part":
            # A cancelled request: its last block was never whole.
            for block in blocks_of(shelf.namer, geometry, numbers)[:-1]:
                shelf.store.put(block)
        else:
            shelf.keep(numbers, decoded_from=len(numbers) // 2 if step == "keep, decoded" else None)
        stats = shelf.store.stats()
        assert int(str(stats["memory_nbytes"])) <= memory_nbytes
        assert int(str(stats.get("disk_nbytes", 0))) <= disk_nbytes
    if PLENTY in (memory_nbytes, disk_nbytes):
        shelf.files.fault = ""
        shelf.reopen()
        while shelf.take(A) == 0:
            shelf.keep(A)
        assert shelf.take(A) in (16, 20)


def test_names_of_one_store_say_nothing_under_another_s_key(tmp_path: Path) -> None:
    first, second = Namer(read_key(store_files(tmp_path / "a")), identities()), Namer(KEY, identities())
    names = [{name for name, *_ in namer.chain(pack_ids(A))} for namer in (first, second)]
    assert not names[0] & names[1]


def test_a_block_on_its_way_to_the_disk_is_found_and_can_be_continued(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    blocks = blocks_of(shelf.namer, FULL, A)
    kept = [shelf.store.keep(block) for block in blocks]
    assert shelf.take(A) == 20, "without memory, before anything was saved"
    assert [account.where for account in shelf.store.accounts(pack_ids(A))] == ["memory"] * 3
    for item in kept:
        assert item is not None
        assert shelf.store.persist(item)
    assert [account.where for account in shelf.store.accounts(pack_ids(A))] == ["disk"] * 3
    assert shelf.take(A) == 20


def test_a_block_that_will_not_be_saved_is_forgotten_with_those_that_continue_it(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    first, second, _ = (shelf.store.keep(block) for block in blocks_of(shelf.namer, FULL, A))
    assert first is not None
    assert second is not None
    shelf.store.release(first)
    assert not shelf.store.persist(second)
    assert shelf.take(A) == 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_chat_whose_first_block_could_not_be_saved_is_saved_with_its_next_turn(tmp_path: Path) -> None:
    """A disk that was full for a moment: what it missed is still in memory, and goes before what continues it."""
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    shelf.files.fault = "enospc"
    assert shelf.keep(A[:8]) == [True]
    assert not list(tmp_path.glob("*.safetensors"))
    shelf.keep(A)
    shelf.reopen()
    assert shelf.take(A) == 20


def test_a_tail_stays_on_disk_until_the_longer_one_is_there(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, PLENTY, PLENTY)
    shelf.keep(A[:18])
    shelf.files.fault = "enospc"
    shelf.keep(A)
    assert shelf.take(A) == 20, "from memory"
    shelf.reopen()
    assert shelf.take(A) == 18
    shelf.keep(A)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    shelf.reopen()
    assert shelf.take(A) == 20


def test_a_clock_that_was_set_back_does_not_keep_new_blocks_out(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, 2500)
    shelf.keep(A[:16])
    for file in tmp_path.glob("*.safetensors"):
        os.utime(file, (4e9, 4e9))
    shelf.reopen()
    new = list(range(200, 216))
    assert shelf.keep(new) == [True, True]
    assert shelf.take(new) == 16
    assert shelf.take(A[:16]) == 0


def test_a_block_that_left_between_match_and_fetch_is_lost_but_not_damaged(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, FULL, 0, PLENTY)
    shelf.keep(A[:16])
    first, second = shelf.store.match(pack_ids(A)).blocks
    assert shelf.disk is not None
    shelf.disk.drop(first.head.name)
    next(tmp_path.glob(f"*{second.head.name.hex()}*")).unlink()
    assert shelf.store.fetch(first.head) is None
    assert shelf.store.stats()["disk_invalid"] == 0
    assert shelf.store.fetch(second.head) is None
    assert shelf.store.stats()["disk_invalid"] == 1, "nobody here deleted this one"
    assert shelf.store.stats()["lost"] == 2
