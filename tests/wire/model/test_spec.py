from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from muser_wire.model.catalogue import catalogue_spec
from muser_wire.model.spec import (
    Activation,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    QKNorm,
    RopeSpec,
    inverse_sqrt,
    spec_difference,
)

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_plain_and_even_frequencies() -> None:
    expected = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(RopeSpec(500000.0, 128).inverse_frequencies(), expected, rtol=1e-15)
    stretched = RopeSpec(500000.0, 128, LinearScaling(8.0)).inverse_frequencies()
    np.testing.assert_allclose(stretched, expected / 8, rtol=1e-15)


def test_llama_3_s_frequencies_by_wavelength() -> None:
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wavelengths = 2 * np.pi / plain
    found = np.array(RopeSpec(500000.0, 128, LLAMA3).inverse_frequencies())
    np.testing.assert_allclose(found[wavelengths < 2048], plain[wavelengths < 2048], rtol=1e-15)
    np.testing.assert_allclose(found[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-15)
    between = (wavelengths >= 2048) & (wavelengths <= 8192)
    smooth = (8192 / wavelengths[between] - 1) / 3
    expected = (1 - smooth) * plain[between] / 8 + smooth * plain[between]
    np.testing.assert_allclose(found[between], expected, rtol=1e-13)
    assert 3 < between.sum() < 12


def test_every_field_is_part_of_the_digest() -> None:
    spec = catalogue_spec("smollm2")
    rope = spec.layers[0].rope
    assert rope is not None
    changes = [
        {"attention_scale": 0.5},
        {"qk_norm": QKNorm(weighted=True, eps=1e-5)},
        {"qk_norm": QKNorm(weighted=False, eps=1e-5)},
        {"attention_gate": True},
        {"post_norm_eps": 1e-5},
        {"activation": Activation.GELU_TANH},
        {"embedding_scale": 2.0},
        {"embedding_norm": True},
        {"logit_scale": 2.0},
        {"logit_softcap": 20.0},
        {"layers": (LayerSpec(64, rope), *spec.layers[1:])},
        {"layers": (LayerSpec(None, replace(rope, scaling=LinearScaling(8.0))), *spec.layers[1:])},
        {"layers": (LayerSpec(None, replace(rope, scaling=LLAMA3)), *spec.layers[1:])},
    ]
    digests = {spec.digest(), *(replace(spec, **change).digest() for change in changes)}
    assert len(digests) == 1 + len(changes)


def test_the_canonical_text_is_plain_json_with_every_field() -> None:
    spec = catalogue_spec("muse-glimmer-30b")
    value = json.loads(spec.canonical_json())
    assert value["activation"] == "silu"
    assert value["qk_norm"] == {"weighted": False, "eps": spec.norm_eps}
    assert value["layers"][3] == {"window": None, "rope": None}
    assert set(value) == set(spec.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("muse-glimmer-30b", "3cd508153ab5b663e7d21159ab61927ba1535aa7857a8a61b984e93b11770cf7"),
        ("gemma3-270m", "77efc623c383f08c6c4b7d765e0071ccb9dc2d9cfbc9c3be1ed09b91d4cde7af"),
        ("smollm2", "c6ebe1cf26c667ed4fb6d6136c3d458b96832a7dd952088fac291f4a77695c9e"),
    ],
)
def test_the_digests_of_published_models_are_pinned(name: str, digest: str) -> None:
    assert catalogue_spec(name).digest().hex() == digest


def test_a_peer_without_a_gate_differs_by_that_name() -> None:
    here = catalogue_spec("muse-glimmer-30b")
    there = replace(here, attention_gate=False)
    error = spec_difference(here, there.canonical_json(), there.digest())
    assert (error.name, error.here, error.there) == ("attention_gate", "True", "False")


def test_an_inverse_root_is_a_float32() -> None:
    assert inverse_sqrt(128) == float(np.float32(1) / np.sqrt(np.float32(128)))
    assert inverse_sqrt(64) == 0.125
