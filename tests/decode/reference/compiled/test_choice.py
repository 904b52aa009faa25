from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference.compiled import choice
from muser_decode.reference.compiled.choice import admitted, compiled_operations, reference_decoder, small
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.conform import require_conformance
from muser_decode.reference.decoder import ReferenceDecoder
from muser_wire.home import muser_home
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import View
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.compiled.operations import (
    Activations,
    Floats,
    Halves,
    HeadNorm,
    Integers,
    Operations,
    Panels,
    Planes,
)
from muser_wire.reference.conformance import golden_digest
from muser_wire.reference.rope import RopeTable
from muser_wire.reference.tiny import RandomWeights, random_spec

SPEC = random_spec(0)
WEIGHTS = RandomWeights(SPEC, 0)


@pytest.mark.parametrize("seed", range(12))
def test_compiled_kernels_are_admitted_here_and_used(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        operations = compiled_operations(random_spec(seed))
    assert "kernel_admitted name=exact.decoder.compiled exact=true" in caplog.text
    assert isinstance(reference_decoder(WEIGHTS, operations), CompiledDecoder)


def test_a_node_with_compiled_kernels_conforms() -> None:
    assert require_conformance(compiled_operations(SPEC)) == golden_digest()


def test_without_a_compiler_plain_operations_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    operations = compiled_operations(SPEC)
    assert operations is None
    assert isinstance(reference_decoder(WEIGHTS, operations), ReferenceDecoder)
    assert "kernel_refused name=exact.decoder.compiled cause=no C++ compiler" in caplog.text


def test_on_a_gpu_plain_operations_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "on_gpu", lambda: True)
    assert compiled_operations(SPEC) is None


class OtherActivation(Operations):
    def activated(self, gate_up: Floats, activation: Activation) -> Activations:
        return super().activated(gate_up, next(other for other in Activation if other is not activation))


class FusedNorm(Operations):
    """A sum in float64: closer to the truth, and not the lane's bytes."""

    def normed(self, x: Floats, weight: Floats | None, eps: float) -> Activations:
        wide = x.astype(np.float64)
        r = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
        return self.quantised((wide * r * weight).astype(np.float32))


class OneUnitOff(Operations):
    """Each product is the next larger float32."""

    def product(self, x: Activations, matrix: list[Panels], residual: Floats | None = None) -> Floats:
        return np.nextafter(super().product(x, matrix, residual), np.float32(np.inf))


class Unturned(Operations):
    def turned(self, x: Floats, norm: HeadNorm | None, positions: RopeTable | None) -> Floats:
        return super().turned(x, norm, None)


class OneStepOff(Operations):
    """One value of a plane is the next float16."""

    def plane(self, x: Floats, norm: HeadNorm | None, positions: RopeTable | None) -> Halves:
        plane = super().plane(x, norm, positions)
        plane.view(np.int16).reshape(-1)[-1] += 1
        return plane


class KeyTooFew(Operations):
    def attended(self, q: Floats, seen: Planes | Integers, view: View) -> Floats:
        window = view.first_query if view.window is None else view.window - 1
        return super().attended(q, seen, View(view.first_query, view.first_key, max(1, window), view.scale))


class OneRowUnderived(Operations):
    def derive(self, rows: Planes, start: int, into: Integers, origin: int) -> None:
        super().derive(Planes(rows.keys[1:], rows.values[1:]) if start else rows, start, into, origin)


@pytest.mark.parametrize(
    "kind", [OtherActivation, FusedNorm, OneUnitOff, Unturned, OneStepOff, KeyTooFew, OneRowUnderived]
)
@pytest.mark.parametrize("seed", [0, 5])
def test_kernels_that_compute_otherwise_are_refused(
    kind: type[Operations], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = kind(load(shared_object(muser_home() / "kernels")), lambda: 1)
    spec = random_spec(seed)
    assert any(layer.rope is not None for layer in spec.layers)
    assert not admitted(wrong, spec)
    assert "kernel_refused name=exact.decoder.compiled differing_values=" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_a_small_model_has_the_features_of_the_served_one(seed: int) -> None:
    spec = random_spec(seed, layers=7)
    made = small(spec)
    for feature in (
        "head_dim",
        "qk_norm",
        "attention_gate",
        "activation",
        "post_norm_eps",
        "logit_softcap",
        "norm_eps",
    ):
        assert getattr(made, feature) == getattr(spec, feature)
    windows = {layer.window is None for layer in spec.layers[:4]}
    assert windows <= {layer.window is None for layer in made.layers}
    assert made.heads * made.head_dim % 32 == made.heads % made.kv_heads == 0


def test_the_kernels_need_nothing_that_only_a_producer_has() -> None:
    """A decode node without torch loads them; this process may hold torch's OpenMP library."""
    program = (
        "import sys; from muser_decode.reference.compiled.choice import compiled_operations;"
        "from muser_wire.reference.tiny import random_spec;"
        "assert compiled_operations(random_spec(0)) is not None; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_logits_are_an_array_of_the_library() -> None:
    decoder = reference_decoder(WEIGHTS, compiled_operations(SPEC))
    logits = decoder.step(mx.array(1), decoder.new_cache())
    assert (logits.shape, logits.dtype) == ((SPEC.vocab_size,), mx.float32)
