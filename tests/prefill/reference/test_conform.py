from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import exact_kernels
import pytest
import torch
from exact_kernels import CPU

from muser_prefill.kernels.exact.compiled import Activations, CompiledProducts
from muser_prefill.reference import conform
from muser_wire.errors import NumericsMismatch
from muser_wire.reference.conformance import differing, golden_digest


def test_this_machine_conforms_with_compiled_kernels_and_without() -> None:
    for kernels in (exact_kernels.compiled(), exact_kernels.plain()):
        assert conform.require_conformance(CPU, kernels) == golden_digest()


def test_the_command_prints_what_was_observed(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.main([]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "torch on cpu"
    assert "exact.products.compiled" in found["kernels"]
    assert differing(found["observed"]) == []


class OneUlp(CompiledProducts):
    """Every output of a product is the next float32."""

    def product(self, x: Activations, matrix: list[Any], residual: torch.Tensor | None = None) -> torch.Tensor:
        result = super().product(x, matrix, residual)
        result.view(torch.int32).add_(1)
        return result


def test_a_decoder_that_is_one_step_off_is_refused_by_the_names_of_the_checks() -> None:
    kernels = exact_kernels.compiled()
    wrong = replace(kernels, products=OneUlp(kernels.products._operations))
    with pytest.raises(NumericsMismatch, match=r"torch on cpu does not compute .* model 2, whole"):
        conform.require_conformance(CPU, wrong)
