from __future__ import annotations

from kvpack_support import FULL, KEY, blocks_of, identities

from muser_wire.kvpack.memory import MemoryTier
from muser_wire.kvpack.naming import Namer

NAMER = Namer(KEY, identities())
A = blocks_of(NAMER, FULL, list(range(20)))
B = blocks_of(NAMER, FULL, [*range(8), *range(50, 58)])
WHOLE, TAIL = 256, 128


def test_of_one_chain_the_deepest_leaves_first() -> None:
    tier = MemoryTier(2 * WHOLE + TAIL)
    for block in A:
        assert tier.put(block, 1) == []
    assert tier.nbytes == 2 * WHOLE + TAIL
    assert tier.put(B[1], 2) == [A[2].head.name, A[1].head.name]
    assert A[0].head.name in tier


def test_what_was_used_least_recently_leaves_first() -> None:
    tier = MemoryTier(2 * WHOLE)
    tier.put(A[0], 1)
    tier.put(A[1], 2)
    tier.touch([A[0].head.name], 3)
    assert tier.put(B[1], 4) == [A[1].head.name]


def test_nothing_leaves_for_a_block_of_the_same_use_or_a_block_that_never_fits() -> None:
    tier = MemoryTier(WHOLE)
    tier.put(A[0], 5)
    assert tier.put(A[1], 5) == [A[1].head.name]
    assert A[0].head.name in tier
    assert MemoryTier(WHOLE - 1).put(A[0], 1) == [A[0].head.name]


def test_nothing_leaves_in_vain_for_a_block_that_cannot_be_kept_all_the_same() -> None:
    tier = MemoryTier(WHOLE + TAIL)
    tier.put(A[2], 1)
    tier.put(A[0], 5)
    # The tail is older, but its room is not enough.
    assert tier.put(A[1], 5) == [A[1].head.name]
    assert (A[2].head.name in tier, tier.evicted) == (True, 0)


def test_putting_a_block_again_counts_its_bytes_once() -> None:
    tier = MemoryTier(WHOLE)
    tier.put(A[0], 1)
    tier.put(A[0], 2)
    assert (tier.nbytes, len(tier)) == (WHOLE, 1)
    tier.drop(A[0].head.name)
    tier.drop(A[0].head.name)
    assert (tier.nbytes, len(tier)) == (0, 0)


def test_a_smaller_bound_lets_the_oldest_leave_and_a_larger_one_lets_others_in() -> None:
    tier = MemoryTier(2 * WHOLE + TAIL)
    for at, block in enumerate(A):
        tier.put(block, at + 1)
    assert tier.bound(WHOLE + TAIL) == [A[0].head.name]
    assert tier.bound(0) == [A[1].head.name, A[2].head.name]
    assert (tier.nbytes, tier.evicted) == (0, 3)
    assert tier.put(A[0], 9) == [A[0].head.name]
    assert tier.bound(1 << 40) == []
    assert tier.put(A[0], 9) == []
    # Never more than at first.
    assert tier.put(A[1], 9) == []
    assert tier.put(B[1], 9) == [B[1].head.name]
