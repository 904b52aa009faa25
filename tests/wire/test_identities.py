from __future__ import annotations

import dataclasses

import pytest

from muser_wire.errors import IdentityMismatch, WireError
from muser_wire.identities import Digest, Identities, compare, digest_of
from muser_wire.numerics import BUDGETS, Lane, budget, numerics_digest

OURS = Identities(Digest(b"s" * 32), Digest(b"t" * 32), "kv1/f16", "native", Digest(b"n" * 32), 2048, Digest(b"w" * 32))


def test_equal_identities_pass() -> None:
    compare(OURS, dataclasses.replace(OURS))


def test_the_chunk_grid_is_refused_by_name_with_both_values() -> None:
    with pytest.raises(IdentityMismatch, match="chunk_tokens differs: 2048 here, 512 at the peer"):
        compare(OURS, dataclasses.replace(OURS, chunk_tokens=512))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Identities)])
def test_only_weights_can_be_waived(name: str) -> None:
    other: object = Digest(b"x" * 32) if isinstance(getattr(OURS, name), bytes) else 7
    theirs = dataclasses.replace(OURS, **{name: other})
    with pytest.raises(IdentityMismatch) as caught:
        compare(OURS, theirs)
    assert caught.value.name == name
    if name == "weights_digest":
        compare(OURS, theirs, allow_unqualified=True)
    else:
        with pytest.raises(IdentityMismatch):
            compare(OURS, theirs, allow_unqualified=True)


def test_joined_parts_have_other_digests() -> None:
    assert digest_of(b"l", b"ab", b"c") != digest_of(b"l", b"a", b"bc") != digest_of(b"l", b"abc")


def test_budgets_have_reasons_and_unknown_ones_are_refused() -> None:
    assert all(entry.max_abs > 0 and entry.reason for entry in BUDGETS.values())
    with pytest.raises(WireError, match="no budget is named 'planes'"):
        budget("planes")


def test_the_native_lanes_rules_are_those_of_version_1() -> None:
    assert numerics_digest(Lane.NATIVE).hex()[:16] == "f5a3d63769fb015b"
