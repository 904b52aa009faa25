from __future__ import annotations

import numpy as np

from muser_decode.reference.compiled.layer import FIRST_POSITIONS, Rope
from muser_wire.model.spec import RopeSpec
from muser_wire.reference.rope import rope_table

SPEC = RopeSpec(10_000.0, 32)


def test_a_table_grows_and_gives_the_rows_of_any_positions() -> None:
    whole, rope = rope_table(SPEC, 0, 5 * FIRST_POSITIONS), Rope(SPEC)
    for positions in (range(3, 9), [7, 0, 7], range(FIRST_POSITIONS - 1, FIRST_POSITIONS + 1), [4 * FIRST_POSITIONS]):
        rows, at = rope.at(positions), list(positions)
        for got, expected in ((rows.cos, whole.cos), (rows.sin, whole.sin)):
            np.testing.assert_array_equal(got, expected[at])
            # The kernels read rows one after another.
            assert got.flags.c_contiguous
