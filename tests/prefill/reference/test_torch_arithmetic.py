from __future__ import annotations

import numpy as np
import pytest
import torch

from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.reference.conformance import differing, observe

AR = TorchArithmetic(torch.device("cpu"))


@pytest.mark.parametrize("flush", [False, True])
def test_every_step_gives_what_the_rules_give_with_subnormals_kept_or_flushed(flush: bool) -> None:
    try:
        assert torch.set_flush_denormal(flush)
        observed = observe(AR)
    finally:
        torch.set_flush_denormal(False)
    assert len(observed) > 15
    assert differing(observed) == []


def test_the_square_root_is_the_one_that_torch_s_own_is_not() -> None:
    x = np.arange(0x3F800000, 0x40800000, 3, dtype=np.uint32).view(np.float32)
    assert np.array_equal(AR.host(AR.sqrt(AR.array(x))), np.sqrt(x.astype(np.float64)).astype(np.float32))


def test_arrays_that_may_not_be_written_are_taken() -> None:
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    assert AR.host(AR.array(x) * 2.0).tolist() == [2, 2, 2]


class Fused(TorchArithmetic):
    """A library whose division is a multiplication by an approximate reciprocal."""

    def reciprocal(self, x: torch.Tensor) -> torch.Tensor:
        guess = 1.0 / x
        return guess + guess * (2.0**-23)


def test_a_reciprocal_by_approximation_is_found() -> None:
    wrong = differing(observe(Fused(torch.device("cpu"))))
    assert "reciprocals and roots" in wrong
    assert "norms" in wrong
