from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact_kernels
import numpy as np
import pytest
import torch
from exact_kernels import CPU

from muser_prefill.kernels.exact import ExactKernels, HeadNorm, Positions, Sight
from muser_prefill.kernels.exact.choice import admitted_among, choose_exact, every_mantissa
from muser_prefill.kernels.exact.compiled import Activations, CompiledAttention, CompiledHeads, CompiledProducts
from muser_prefill.kernels.exact.reference import PlainProducts
from muser_wire.model.spec import Activation

ALL = ("exact.products.compiled", "exact.heads.compiled", "exact.attention.compiled")


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_compiled_kernels_are_admitted_here(head_dim: int) -> None:
    chosen = choose_exact(head_dim, CPU)
    assert chosen.admitted == ALL
    assert isinstance(chosen.products, CompiledProducts)


def test_without_a_compiler_plain_operations_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    chosen = choose_exact(64, CPU)
    assert chosen.admitted == ()
    assert isinstance(chosen.products, PlainProducts)
    assert "kernel_refused name=exact.* cause=no C++ compiler" in caplog.text


class OtherActivation(CompiledProducts):
    def activated(self, gate_up: torch.Tensor, activation: Activation) -> Activations:
        return super().activated(gate_up, next(other for other in Activation if other is not activation))


class FusedNorm(CompiledProducts):
    """A sum in float64: closer to the truth, and not the lane's bytes."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        r = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
        return self.quantised((x.double() * r * weight).float())


class OtherOrder(CompiledProducts):
    """Groups in descending order: the same sum, rounded elsewhere."""

    def product(self, x: Activations, matrix: list[Any], residual: torch.Tensor | None = None) -> torch.Tensor:
        values = x.values.view(len(x.values), -1, 32).flip(1).reshape(x.values.shape)
        turned = Activations(values, x.scales.flip(1).contiguous(), x.sums.flip(1).contiguous())
        return super().product(turned, [self._turned(part) for part in matrix], residual)

    @staticmethod
    def _turned(part: Any) -> Any:
        groups = 32 // part.group
        panels, _, outputs, two = part.weights.shape
        weights = np.flip(part.weights.reshape(panels, -1, 16, outputs, two), 1).reshape(part.weights.shape)
        scales = [
            None if s is None else np.flip(s.reshape(panels, -1, groups, outputs), 1).reshape(s.shape)
            for s in (part.scales, part.offsets)
        ]
        return replace(part, weights=weights, scales=scales[0], offsets=scales[1])


class WithoutResidual(CompiledProducts):
    def product(self, x: Activations, matrix: list[Any], residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().product(x, matrix)


class Unturned(CompiledHeads):
    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        return super().plane(x, norm, None)


class OneStepOff(CompiledHeads):
    """One value of one plane is the next float16."""

    def plane(self, x: torch.Tensor, norm: HeadNorm | None, positions: Positions | None) -> torch.Tensor:
        plane = super().plane(x, norm, positions)
        plane.view(torch.int16)[3, 0, 5] += 1
        return plane


class WindowOneShorter(CompiledAttention):
    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        return super().attended(q, keys, values, replace(sight, window=sight.window and sight.window - 1), scale)


class Softmax(CompiledAttention):
    """The definition in float64, rounded once."""

    def attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sight: Sight, scale: float
    ) -> torch.Tensor:
        if sight.window is not None:
            return super().attended(q, keys, values, sight, scale)
        k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        seen = torch.arange(len(k)) <= torch.arange(sight.start, sight.start + len(q))[:, None]
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf) * torch.log(torch.tensor(2.0)), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).float().reshape(len(q), -1)


class Broken(CompiledAttention):
    def attended(self, *arguments: object) -> torch.Tensor:
        raise RuntimeError("no such instruction\nmore")


def admitted(**wrong: type) -> tuple[str, ...]:
    kernels = exact_kernels.compiled()
    compiled = kernels.products._operations
    spoiled: ExactKernels = replace(kernels, **{name: kind(compiled) for name, kind in wrong.items()})
    return admitted_among(spoiled, exact_kernels.plain(), "compiled", 64, CPU).admitted


@pytest.mark.parametrize("kind", [OtherActivation, FusedNorm, OtherOrder, WithoutResidual])
def test_wrong_products_are_refused_and_the_others_stay(kind: type) -> None:
    assert admitted(products=kind) == ALL[1:]


@pytest.mark.parametrize("kind", [Unturned, OneStepOff])
def test_wrong_heads_are_refused_and_the_others_stay(kind: type) -> None:
    assert admitted(heads=kind) == (ALL[0], ALL[2])


@pytest.mark.parametrize("kind", [WindowOneShorter, Softmax, Broken])
def test_wrong_attention_is_refused_and_the_others_stay(kind: type) -> None:
    assert admitted(attention=kind) == ALL[:2]


def test_a_refusal_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        admitted(attention=Broken, heads=OneStepOff)
    assert "kernel_admitted name=exact.products.compiled exact=true" in caplog.text
    assert "kernel_refused name=exact.heads.compiled differing_values=6" in caplog.text
    assert "kernel_refused name=exact.attention.compiled cause=no such instruction" in caplog.text


def test_the_true_kernels_pass_the_same_way() -> None:
    assert admitted() == ALL


def test_without_triton_a_gpu_gets_plain_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "muser_prefill.kernels.exact.triton.kernels", None)
    chosen = choose_exact(64, torch.device("cuda"))
    assert chosen.admitted == ()
    assert isinstance(chosen.products, PlainProducts)
    assert "kernel_refused name=exact.* cause=Triton cannot be imported" in caplog.text


def test_the_package_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import muser_prefill.lanes, muser_prefill.device"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_mantissa_is_there_once() -> None:
    x = every_mantissa(-2, CPU)
    assert (x[0], x[-1], len(x)) == (0.25, 0.5 - 2.0**-25, 1 << 23)
    assert bool((x[1:] > x[:-1]).all())
