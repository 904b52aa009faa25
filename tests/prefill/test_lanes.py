from __future__ import annotations

import argparse
from pathlib import Path

import exact_kernels
import numpy as np
import pytest
import torch
from exact_kernels import CPU

from muser_prefill import lanes
from muser_prefill.config import PrefillConfig, add_arguments, from_arguments
from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.runner import prefill
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.errors import CheckpointError, NumericsMismatch
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.reference.decoder import ReferenceDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic


@pytest.fixture(scope="module")
def quantised(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lanes") / "tiny.gguf"
    write_tiny_gguf(path, tiny_llama, encoding="Q4_1")
    return path


def config(model: Path, *flags: str) -> PrefillConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", str(model), "--chunk-tokens", "32", *flags]))


def test_the_reference_lane_computes_the_rules_bytes(quantised: Path) -> None:
    loaded = lanes.load(config(quantised, "--lane", "reference"), CPU)
    assert isinstance(loaded.decoder, TorchReferenceDecoder)
    assert loaded.decoder.admitted == (
        "exact.products.compiled",
        "exact.heads.compiled",
        "exact.attention.compiled",
    )
    ids = np.random.default_rng(0).integers(0, 512, 75).tolist()
    cache = loaded.decoder.new_cache(75)
    prefill(loaded.decoder, ids, cache, 32, lambda chunk, layer: None)
    plain = ReferenceDecoder(NumpyArithmetic(), CanonicalWeights(open_checkpoint(quantised)))
    expected = plain.new_cache()
    plain.forward(ids, expected)
    for layer in range(len(plain.spec.layers)):
        for got, want in zip(cache.planes(layer, 0, 75), expected.planes(layer), strict=True):
            assert got.numpy().tobytes() == np.ascontiguousarray(want).tobytes()


def test_identities_name_the_lane_its_rules_and_its_weights(quantised: Path) -> None:
    native = lanes.load(config(quantised, "--kv", "f16"), CPU)
    reference = lanes.load(config(quantised, "--lane", "reference"), CPU)
    assert isinstance(native.decoder, TorchDecoder)
    assert (native.identities.lane, reference.identities.lane) == ("native", "reference")
    assert native.identities.kv_layout == reference.identities.kv_layout
    assert native.identities.numerics_digest != reference.identities.numerics_digest
    assert reference.identities.weights_digest == CanonicalWeights(open_checkpoint(quantised)).digest()


def test_weights_that_are_no_integers_are_refused_by_name(tiny_llama: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"embed.weight is stored as F32; the reference lane computes with integers"
    ):
        lanes.load(config(tiny_llama, "--lane", "reference"), CPU)


def test_a_device_that_does_not_conform_does_not_start(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: true_sqrt(x) * (1 + 2.0**-22))
    monkeypatch.setattr(lanes, "choose_exact", lambda head_dim, device: exact_kernels.plain())
    with pytest.raises(NumericsMismatch, match=r"torch on cpu does not compute .* reciprocals and roots"):
        lanes.load(config(quantised, "--lane", "reference"), CPU)
