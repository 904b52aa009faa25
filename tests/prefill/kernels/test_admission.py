from __future__ import annotations

import logging

import pytest
import torch

from muser_prefill.kernels.admission import admit, fixed_vector

ONE = torch.ones(2)


def test_a_kernel_within_its_budget_is_admitted() -> None:
    assert admit("k", lambda: ONE + 0.25, lambda: ONE, max_abs=0.25)


@pytest.mark.parametrize("bad", [1.5, float("nan"), float("inf")])
def test_a_kernel_that_misses_is_refused_and_named(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not admit("attention.fast", lambda: torch.tensor([1.0, bad]), lambda: ONE, max_abs=0.25)
    assert "kernel_refused name=attention.fast" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no such operator\ndetails"), AttributeError("mkldnn")])
def test_a_kernel_that_this_build_lacks_is_refused(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> torch.Tensor:
        raise error

    assert not admit("k", missing, lambda: ONE, max_abs=1.0)
    assert "details" not in caplog.text


def test_the_fixed_vector_is_the_same_every_time() -> None:
    torch.manual_seed(1)
    first = fixed_vector((3, 4), 7, torch.float32, torch.device("cpu"))
    torch.manual_seed(2)
    assert torch.equal(first, fixed_vector((3, 4), 7, torch.float32, torch.device("cpu")))
    assert not torch.equal(first, fixed_vector((3, 4), 8, torch.float32, torch.device("cpu")))
