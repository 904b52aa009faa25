"""The table of the rules: every change is a new version."""

from __future__ import annotations

import json
import math

from muser_wire.numerics import Lane, rules_digest
from muser_wire.reference import constants


def test_the_rules_are_those_of_version_1() -> None:
    assert constants.RULES_VERSION == 1
    assert rules_digest(Lane.REFERENCE).hex()[:16] == "a961f304c2ca22fd"


def test_every_constant_is_in_the_table() -> None:
    names = {name for name in vars(constants) if name.isupper()}
    table = constants.table()
    assert {name.lower() for name in names} == set(table)
    assert json.loads(json.dumps(table)) == table


def test_sums_of_products_fit_the_formats_that_carry_them() -> None:
    largest = 1 << constants.INTEGER_BITS
    # float32 holds whole numbers up to 2 ** 24: activations times int8, and limbs times 12 bits.
    assert largest * 128 * constants.WEIGHT_GROUP <= 1 << 24
    assert largest * (largest >> constants.LIMB_BITS) * constants.KEY_BLOCK <= 1 << 24
    assert constants.KEY_BLOCK << constants.DENOMINATOR_BITS <= 1 << 24
    # int32 holds whole products.
    assert largest * largest * max(constants.HEAD_GROUP, constants.KEY_BLOCK) < 1 << 31


def test_constants_are_the_float32_next_to_what_they_stand_for() -> None:
    pairs = [
        (constants.LOG2_E, math.log2(math.e)),
        (constants.GELU_LINEAR, 2 * math.sqrt(2 / math.pi)),
        (constants.GELU_CUBIC, 0.044715 * 2 * math.sqrt(2 / math.pi)),
    ]
    assert all(abs(mine - exact) <= exact * 2**-24 for mine, exact in pairs)
