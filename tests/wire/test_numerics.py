"""Lanes: refused by name when they differ, digests that a rule changes, and no drafter anywhere yet."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from muser_wire.errors import CheckpointError, IdentityMismatch, NumericsMismatch
from muser_wire.geometry import ElementType
from muser_wire.identities import Digest, Identities, compare
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.identity import node_identities
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import (
    LANE_RULES,
    Lane,
    check_element,
    numerics_digest,
    rules_digest,
    speculation_allowed,
)
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.reference.conformance import golden_digest

CONFORMS = golden_digest()
OTHERWISE = Digest(b"o" * 32)


def test_a_lane_s_digest_covers_its_rules_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics_digest(Lane.REFERENCE, CONFORMS)
    assert right != numerics_digest(Lane.REFERENCE, OTHERWISE) != numerics_digest(Lane.NATIVE)
    before = rules_digest(Lane.REFERENCE)
    monkeypatch.setitem(LANE_RULES[Lane.REFERENCE], "planes", "another rule")
    assert numerics_digest(Lane.REFERENCE, CONFORMS) != right
    assert rules_digest(Lane.REFERENCE) != before


def test_the_reference_lane_needs_a_device_that_was_looked_at() -> None:
    with pytest.raises(NumericsMismatch, match="the reference lane needs a conformance digest"):
        numerics_digest(Lane.REFERENCE)
    with pytest.raises(NumericsMismatch, match="the native lane has no conformance digest"):
        numerics_digest(Lane.NATIVE, CONFORMS)


@pytest.fixture(scope="module")
def quantised(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lanes") / "tiny.gguf"
    write_tiny_gguf(path, tiny_llama, encoding="Q8_0")
    return path


def identities(path: Path, lane: Lane, conformance: Digest | None = None) -> Identities:
    return node_identities(
        open_checkpoint(path),
        load_tokenizer(path),
        element=ElementType.F16,
        lane=lane,
        chunk_tokens=64,
        conformance=conformance,
    )


def test_lanes_are_refused_by_name_when_they_differ(quantised: Path) -> None:
    native, reference = identities(quantised, Lane.NATIVE), identities(quantised, Lane.REFERENCE, CONFORMS)
    with pytest.raises(IdentityMismatch, match="lane differs: native here, reference at the peer"):
        compare(native, reference, allow_unqualified=True)
    with pytest.raises(IdentityMismatch, match="lane differs: reference here, native at the peer"):
        compare(reference, native)


def test_a_device_that_rounds_otherwise_is_refused_by_name(quantised: Path) -> None:
    right, other = (identities(quantised, Lane.REFERENCE, digest) for digest in (CONFORMS, OTHERWISE))
    with pytest.raises(IdentityMismatch, match="numerics_digest differs"):
        compare(right, other, allow_unqualified=True)


def test_the_reference_lane_names_weights_by_their_canonical_form(quantised: Path, tiny_llama: Path) -> None:
    reference = identities(quantised, Lane.REFERENCE, CONFORMS)
    assert reference.weights_digest == CanonicalWeights(open_checkpoint(quantised)).digest()
    assert reference.weights_digest != identities(quantised, Lane.NATIVE).weights_digest
    altered = dataclasses.replace(reference, weights_digest=Digest(b"w" * 32))
    with pytest.raises(IdentityMismatch, match="weights_digest differs"):
        compare(reference, altered)
    with pytest.raises(CheckpointError, match="muser model quantize"):
        identities(tiny_llama, Lane.REFERENCE, CONFORMS)


def test_the_reference_lane_has_f16_planes() -> None:
    check_element(Lane.REFERENCE, ElementType.F16)
    check_element(Lane.NATIVE, ElementType.BF16)
    with pytest.raises(NumericsMismatch, match="stores keys and values as f16, not bf16"):
        check_element(Lane.REFERENCE, ElementType.BF16)


def test_no_lane_takes_a_drafter() -> None:
    with pytest.raises(NumericsMismatch, match="a drafter is refused in the native lane"):
        speculation_allowed(Lane.NATIVE)
    with pytest.raises(NumericsMismatch, match="allowed in the reference lane, but speculation is not built yet"):
        speculation_allowed(Lane.REFERENCE)
