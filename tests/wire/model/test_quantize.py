"""`muser model quantize`: the file means the same model, and the reference lane takes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.quantize import quantize_model
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.reference.canonical import CanonicalWeights

FAMILIES = ("llama", "llama3", "mistral", "qwen3", "gemma3", "muse_glimmer")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / request.param
    write_tiny(request.param, path, layers=2, hidden=256, ffn=256, head_dim=64)
    return path


@pytest.mark.parametrize(("target", "inner", "error"), [("q8_0", "Q8_0", 0.01), ("q4_k", "Q4_K", 0.1)])
def test_a_folder_becomes_a_file_of_the_same_model(
    folder: Path, tmp_path: Path, target: str, inner: str, error: float
) -> None:
    out = tmp_path / "out.gguf"
    counts = quantize_model(folder, out, target)
    assert set(counts) == {inner, "Q8_0", "F32"}
    source, written = open_checkpoint(folder), open_checkpoint(out)
    assert written.spec == source.spec
    assert load_tokenizer(out).digest() == load_tokenizer(folder).digest()
    weights = CanonicalWeights(written)
    for name in weights.names():
        wanted = source.weight(name).f32()
        if wanted.ndim == 1:
            assert (weights.vector(name) == wanted).all()
        else:
            assert np.sqrt(np.mean((weights.linear(name).values() - wanted) ** 2)) < error * wanted.std()
    outer = [name for name in ("embed.weight", "head.weight") if name in weights.names()]
    assert all(written.weight(name).encoding == "Q8_0" for name in outer)


def test_a_file_and_its_folder_give_the_same_weights(folder: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "f32.gguf", folder)
    for source, out in ((folder, "a.gguf"), (tmp_path / "f32.gguf", "b.gguf")):
        quantize_model(source, tmp_path / out, "q4_0")
    first, second = (CanonicalWeights(open_checkpoint(tmp_path / out)) for out in ("a.gguf", "b.gguf"))
    assert first.digest() == second.digest()
    assert first.spec == second.spec


def test_rows_that_no_large_block_divides_become_q8_0(tiny_llama: Path, tmp_path: Path) -> None:
    counts = quantize_model(tiny_llama, tmp_path / "out.gguf", "q4_k")
    assert set(counts) == {"Q8_0", "F32"}


def test_what_is_integers_already_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "q.gguf", tiny_llama, encoding="Q4_1")
    with pytest.raises(CheckpointError, match=r"q\.gguf: every matrix is integers with scales already"):
        quantize_model(tmp_path / "q.gguf", tmp_path / "out.gguf", "q8_0")
    assert not list(tmp_path.glob("out*"))


def test_nothing_is_overwritten(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="exists; quantize overwrites nothing"):
        quantize_model(tiny_llama, tmp_path / "out.gguf", "q8_0")
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_rows_that_no_block_divides_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "odd", hidden=64, ffn=80)
    with pytest.raises(CheckpointError, match=r"has rows of 80, which no block of Q8_0 divides"):
        quantize_model(tmp_path / "odd", tmp_path / "out.gguf", "q8_0")
    assert not list(tmp_path.glob("out*"))


def test_what_a_gguf_file_cannot_say_is_refused(tmp_path: Path) -> None:
    write_tiny("llama3", tmp_path / "stretched", hidden=64, ffn=96, head_dim=16)
    config = tmp_path / "stretched" / "config.json"
    fields = json.loads(config.read_text())
    # Divisors stand for the factors of the published models alone.
    fields["rope_scaling"]["low_freq_factor"] = 2.0
    config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"stretched cannot be said in a GGUF file: .*rope_freqs"):
        quantize_model(tmp_path / "stretched", tmp_path / "out.gguf", "q8_0")
    assert not list(tmp_path.glob("out*"))
