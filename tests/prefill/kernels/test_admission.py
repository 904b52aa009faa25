from __future__ import annotations

import logging

import pytest
import torch

from muser_prefill.kernels.admission import admit, admit_exact, fixed_vector

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


def test_equal_values_are_admitted_whatever_the_sign_of_zero(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert admit_exact("k", lambda: [ONE, torch.tensor([-0.0])], lambda: [ONE, torch.tensor([0.0])])
    assert "kernel_admitted name=k exact=true" in caplog.text


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        ([ONE, torch.tensor([1.0, 1.0 + 2.0**-23])], "differing_values=1"),
        ([ONE, torch.tensor([1.0, float("nan")])], "differing_values=1"),
        ([ONE], "zip()"),
        ([ONE, torch.ones(3)], "[3] torch.float32 where [2] torch.float32 belongs"),
        ([ONE, ONE.double()], "[2] torch.float64 where [2] torch.float32 belongs"),
    ],
)
def test_anything_else_is_refused(got: list[torch.Tensor], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not admit_exact("exact.fast", lambda: got, lambda: [ONE, ONE])
    assert "kernel_refused name=exact.fast" in caplog.text
    assert reason in caplog.text


def test_an_exact_kernel_that_cannot_run_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> list[torch.Tensor]:
        raise RuntimeError("no such operator\ndetails")

    assert not admit_exact("k", missing, lambda: [ONE])
    assert "details" not in caplog.text
