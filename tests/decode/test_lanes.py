from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from muser_decode import lanes
from muser_decode.config import DecodeConfig, add_arguments, from_arguments
from muser_decode.decoder import MlxDecoder
from muser_decode.reference.compiled.decoder import CompiledDecoder
from muser_decode.reference.decoder import ReferenceDecoder
from muser_decode.serve import load
from muser_wire.errors import CheckpointError, NumericsMismatch
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.reference.conformance import golden_digest
from muser_wire.reference.decoder import ReferenceDecoder as PlainDecoder
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic


@pytest.fixture(scope="module")
def quantised(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lanes") / "tiny.gguf"
    write_tiny_gguf(path, tiny_llama, encoding="Q4_1")
    return path


def config(model: Path, *flags: str) -> DecodeConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", str(model), *flags]), on_gpu=False)


@pytest.mark.parametrize(("compiler", "kind"), [(None, CompiledDecoder), ("no-such-compiler", ReferenceDecoder)])
def test_the_reference_lane_computes_the_rules_bytes(
    compiler: str | None, kind: type, quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    reference, checkpoint = config(quantised, "--lane", "reference"), open_checkpoint(quantised)
    device = lanes.check_device(reference, checkpoint)
    decoder = lanes.load_decoder(reference, checkpoint, device)
    assert isinstance(decoder, kind)
    # What conformed is what computes, and what metrics name.
    assert device.conformance == golden_digest()
    assert device.kernels == (("exact.decoder.compiled",) if kind is CompiledDecoder else ())
    ids = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, 75).tolist()
    cache = decoder.new_cache()
    decoder.prefill_chunk(ids[:-1], cache)
    logits = np.array(decoder.step(mx.array(ids[-1]), cache))
    plain = PlainDecoder(NumpyArithmetic(), CanonicalWeights(open_checkpoint(quantised)))
    expected = plain.logits(plain.forward(ids, plain.new_cache())[-1:])[0]
    assert logits.tobytes() == expected.tobytes()


def test_the_native_lane_stays_what_it_was(quantised: Path) -> None:
    checkpoint = open_checkpoint(quantised)
    native = config(quantised, "--kv", "f16")
    device = lanes.check_device(native, checkpoint)
    assert isinstance(lanes.load_decoder(native, checkpoint, device), MlxDecoder)
    assert (device.conformance, device.kernels) == (None, ())
    assert lanes.computed(native) == "f32 dense"
    assert lanes.computed(config(quantised, "--lane", "reference")) == "reference"


def test_identities_name_the_lane_its_rules_and_its_weights(quantised: Path) -> None:
    native = load(config(quantised, "--kv", "f16")).served.identities
    reference = load(config(quantised, "--lane", "reference")).served.identities
    assert (native.lane, reference.lane) == ("native", "reference")
    assert native.kv_layout == reference.kv_layout
    assert native.numerics_digest != reference.numerics_digest
    assert reference.weights_digest == CanonicalWeights(open_checkpoint(quantised)).digest()


def test_weights_that_are_no_integers_are_refused_by_name(tiny_llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"embed.weight is stored as F32; the reference lane computes with"):
        load(config(tiny_llama, "--lane", "reference"))


def test_a_device_that_does_not_conform_does_not_start(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqrt = mx.sqrt
    monkeypatch.setattr(mx, "sqrt", lambda x: sqrt(x) * (1 + 2.0**-22))
    with pytest.raises(NumericsMismatch, match=r"MLX .* does not compute as the reference lane's rules say"):
        load(config(quantised, "--lane", "reference"))
