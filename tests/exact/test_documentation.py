"""docs/numerics.md says what the code computes with, and every clause that the code cites is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muser_wire.numerics import Lane, rules_digest
from muser_wire.reference import constants
from muser_wire.reference.blocks import DECODERS
from muser_wire.reference.conformance import golden_digest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
CLAUSES = set(re.findall(r"^## (N\d+)\.", PAGE, flags=re.MULTILINE))


def test_version_and_digests_are_the_code_s() -> None:
    shown = re.search(r"Rules version (\d+), digest `([0-9a-f]{16})`; .*? is `([0-9a-f]{16})`", PAGE)
    assert shown is not None
    wanted = (str(constants.RULES_VERSION), rules_digest(Lane.REFERENCE).hex()[:16], golden_digest().hex()[:16])
    assert shown.groups() == wanted
    assert f"| {constants.RULES_VERSION} |" in PAGE.partition("## History")[2]


def test_numbers_are_the_code_s() -> None:
    for bits in constants.EXP2_BITS:
        assert f"`{bits:#010x}`" in PAGE
    for name in DECODERS:
        assert name in PAGE
    for text in (f"at least {constants.SMALLEST_EXPONENT}", f"from {constants.SMALLEST_PRODUCT_EXPONENT}"):
        assert text in PAGE


@pytest.mark.parametrize("package", ["muser_wire", "muser_prefill", "muser_decode"])
def test_cited_clauses_exist(package: str) -> None:
    assert {f"N{number}" for number in range(1, 13)} == CLAUSES
    for path in sorted((ROOT / package).rglob("*.py")):
        cited = set(re.findall(r"\[(N\d+)", path.read_text(encoding="utf-8")))
        assert cited <= CLAUSES, path
