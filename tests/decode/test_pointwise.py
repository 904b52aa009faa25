from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from muser_decode import pointwise as module
from muser_decode.errors import ModelNotSupported
from muser_decode.pointwise import Pointwise, pointwise
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import Activation, ModelSpec
from muser_wire.numerics import budget

GATES = np.array([-2.0, 0.5, -200.0, 90.0, 0.0])
OTHERS = np.array([3.0, -4.0, 5.0, 0.25, 7.0])


@pytest.fixture
def spec(tiny_llama: Path) -> ModelSpec:
    return open_checkpoint(tiny_llama).spec


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="mlx compiles for a CPU with the C++ compiler")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=needs_compiler)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices for either device, both computed here."""
    monkeypatch.setattr(module, "on_gpu", lambda: request.param == "gpu")


def computed(function: Any, *values: np.ndarray) -> np.ndarray:
    return np.array(function(*(mx.array(value.astype(np.float32)) for value in values)))


def test_silu_bends_the_gate(spec: ModelSpec) -> None:
    expected = [-2.0 / (1 + math.e**2) * 3.0, 0.5 / (1 + math.e**-0.5) * -4.0, 0.0, 22.5, 0.0]
    out = computed(pointwise(spec, ElementType.F16).activated, GATES, OTHERS)
    assert np.abs(out - expected).max() <= budget("attention_f32")


def test_gelu_in_tanh_s_form_bends_the_gate(spec: ModelSpec) -> None:
    def gelu(x: float) -> float:
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    spec = replace(spec, activation=Activation.GELU_TANH)
    out = computed(pointwise(spec, ElementType.F16).activated, GATES, OTHERS)
    assert np.abs(out - [gelu(gate) * up for gate, up in zip(GATES, OTHERS, strict=True)]).max() <= budget(
        "attention_f32"
    )


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_large_gates_stay_numbers_in_half_types(spec: ModelSpec, activation: Activation, dtype: mx.Dtype) -> None:
    activated = pointwise(replace(spec, activation=activation), ElementType.F16).activated
    gates = mx.array([-900.0, -60.0, 60.0, 900.0]).astype(dtype)
    out = activated(gates, mx.ones(4, dtype))
    assert out.dtype == dtype
    expected = np.array([0.0, 0.0, 60.0, gates[3].astype(mx.float32).item()])
    assert np.abs(np.array(out.astype(mx.float32)) - expected).max() <= budget("attention_f32")


def test_a_sigmoid_opens_and_shuts_attention(spec: ModelSpec) -> None:
    out = computed(pointwise(spec, ElementType.F16).gated, OTHERS, GATES)
    expected = [3.0 / (1 + math.e**2), -4.0 / (1 + math.e**-0.5), 0.0, 0.25, 3.5]
    assert np.abs(out - expected).max() <= budget("attention_f32")


def test_keys_lie_above_values_and_both_are_rounded(spec: ModelSpec) -> None:
    k, v = np.random.default_rng(0).standard_normal((2, 2, 3, 4)).astype(np.float32)
    k[0, 0, 0] = 1e6
    out = computed(pointwise(spec, ElementType.F16).joined, k, v)
    np.testing.assert_array_equal(out, np.clip(np.concatenate([k, v]), -65504, 65504).astype(np.float16))
    # Another number of tokens takes the same compiled group.
    assert computed(pointwise(spec, ElementType.F16).joined, k[:, :1], v[:, :1]).shape == (4, 1, 4)


@pytest.mark.parametrize(
    ("scale", "cap", "expected"),
    [
        (1.0, None, [-40.0, 0.5]),
        (0.25, None, [-10.0, 0.125]),
        (0.25, 20.0, [20 * math.tanh(-0.5), 20 * math.tanh(0.00625)]),
    ],
)
def test_logits_are_scaled_then_capped_in_float32(
    spec: ModelSpec, scale: float, cap: float | None, expected: list[float]
) -> None:
    groups: Pointwise = pointwise(replace(spec, logit_scale=scale, logit_softcap=cap), ElementType.F16)
    for dtype in (mx.float32, mx.bfloat16):
        out = groups.logits(mx.array([-40.0, 0.5]).astype(dtype))
        assert out.dtype == mx.float32
        assert np.abs(np.array(out) - expected).max() <= budget("planes_f32")


def test_an_unknown_activation_is_refused_by_name(spec: ModelSpec) -> None:
    with pytest.raises(ModelNotSupported, match="activation relu"):
        pointwise(replace(spec, activation=cast(Activation, "relu")), ElementType.F16)
