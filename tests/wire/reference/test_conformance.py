"""The conformance set: numpy gives the golden hashes, and a device that does not is named and refused."""

from __future__ import annotations

import numpy as np
import pytest

from muser_wire.errors import NumericsMismatch
from muser_wire.reference import conformance
from muser_wire.reference.conformance import (
    QUICK,
    THOROUGH,
    conformance_digest,
    cut,
    differing,
    golden_digest,
    hash_of,
    observe,
    require,
)
from muser_wire.reference.golden import GOLDEN
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic


def test_numpy_gives_every_golden_hash() -> None:
    observed = observe(NumpyArithmetic(), thorough=True)
    assert observed == GOLDEN
    assert set(QUICK) | set(THOROUGH) < set(GOLDEN)
    assert differing(observed) == []


def test_the_digest_is_that_of_version_1() -> None:
    assert golden_digest().hex()[:16] == "63a2c1f30c28ae61"


def test_the_digest_covers_what_both_kinds_of_node_observe() -> None:
    shared = {name: value for name, value in GOLDEN.items() if name not in THOROUGH and "logits" not in name}
    assert conformance_digest(shared) == golden_digest()
    for name in shared:
        assert conformance_digest({**shared, name: "0" * 16}) != golden_digest()


class TruncatedConversion(NumpyArithmetic):
    """float16 by cutting bits off."""

    def to_float16(self, x: np.ndarray) -> np.ndarray:
        cut_off = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return cut_off.astype(np.float16)


def test_a_device_that_rounds_otherwise_is_refused_and_the_checks_named() -> None:
    observed = observe(TruncatedConversion())
    wrong = differing(observed)
    assert {"rounding", "attention", "model 2, whole: planes"} <= set(wrong)
    assert not {"linear layers", "norms", "powers"} & set(wrong)
    with pytest.raises(NumericsMismatch, match=r"the test does not compute .* rounding, attention, .*--lane native"):
        require(observed, "the test")


def test_both_zeros_count_as_one_and_nothing_else_does() -> None:
    assert hash_of([np.float32([-0.0, 1])]) == hash_of([np.float32([0.0, 1])])
    assert hash_of([np.float32([0.0, 1])]) != hash_of([np.float32([1e-45, 1])])
    assert hash_of([np.int32([3])]) != hash_of([np.int32([4])])


def test_cuts_hold_everything() -> None:
    assert cut([1, 2, 3, 4, 5], (2, 1)) == [[1, 2], [3], [4, 5]]
    assert sum(conformance.MODEL_CHUNKS) <= conformance.MODEL_TOKENS
