"""What breaks a rule is seen: by conformance before a handoff, or by the digests of planes and logits after one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from broken_rules import BROKEN, Broken, logits_of, moved

from muser_wire.errors import NumericsMismatch
from muser_wire.numerics import Lane, numerics_digest
from muser_wire.reference.conformance import conformance_digest, differing, golden_digest, observe, require
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_ids, random_spec

SEED = 5
NEARLY_ALL = 0.99
"""What docs/numerics.md says of how many logits move."""
WEIGHTS = RandomWeights(random_spec(SEED, layers=3), SEED)
IDS = random_ids(WEIGHTS.spec, SEED, 96)


@pytest.fixture(scope="module")
def right() -> Any:
    return logits_of(NumpyArithmetic(), WEIGHTS, IDS)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.what)
def test_a_broken_rule_moves_logits_and_is_caught(broken: Broken, right: Any, record_property: Any) -> None:
    with broken.applied() as ar:
        count = moved(logits_of(ar, WEIGHTS, IDS), right)
        observed = observe(ar)
    record_property("logits_moved", f"{count} of {right.size}")
    print(f"{broken.what}: {count} of {right.size} logits moved")
    assert count > NEARLY_ALL * right.size
    assert differing(observed)
    # A node does not start, and one that did anyway would be refused by name.
    with pytest.raises(NumericsMismatch, match="does not compute as the reference lane's rules say"):
        require(observed, "this device")
    identities = (numerics_digest(Lane.REFERENCE, digest) for digest in (conformance_digest(observed), golden_digest()))
    assert len(set(identities)) == 2


def test_one_step_in_one_value_plane_is_caught(right: Any, record_property: Any) -> None:
    layer = next(index for index, kind in enumerate(WEIGHTS.spec.layers) if kind.window is None)
    wrong = logits_of(NumpyArithmetic(), WEIGHTS, IDS, stepped=layer)
    count = moved(wrong, right)
    record_property("logits_moved", f"{count} of {right.size}")
    print(f"one step of float16 in one value: {count} of {right.size} logits moved")
    assert count > NEARLY_ALL * right.size
    # Nobody would notice by the size of it.
    assert float(np.abs(wrong - right).max()) < 0.02 * float(np.abs(right).max())


def test_nothing_moves_when_no_rule_is_broken(right: Any) -> None:
    assert moved(logits_of(NumpyArithmetic(np.float64), WEIGHTS, IDS), right) == 0
    assert require(observe(NumpyArithmetic()), "numpy") == golden_digest()
