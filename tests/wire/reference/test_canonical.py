"""Canonical weights: the values of the checkpoint, one digest whatever the container, and refusals by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.spec import QKNorm
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.reference.canonical import CanonicalWeights, check_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("canonical")
    write_tiny("muse_glimmer", path / "tiny", head_dim=16)
    return path


def quantised(folder: Path, encoding: str) -> Path:
    path = folder / f"{encoding}.gguf"
    if not path.exists():
        write_tiny_gguf(path, folder / "tiny", encoding=encoding)
    return path


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_and_rows_are_those_of_the_checkpoint(folder: Path, encoding: str) -> None:
    checkpoint = open_checkpoint(quantised(folder, encoding))
    weights = CanonicalWeights(checkpoint)
    assert weights.names() == checkpoint.names()
    for name in weights.names():
        wanted = checkpoint.weight(name).f32()
        assert weights.shape(name) == wanted.shape
        if wanted.ndim == 1:
            assert (weights.vector(name) == wanted).all()
        else:
            assert (weights.linear(name).values() == wanted).all()
            assert (weights.linear(name, 5, 11).values() == wanted[5:11]).all()
    assert (weights.rows([3, 0, 3]) == checkpoint.weight("embed.weight").f32()[[3, 0, 3]]).all()


def test_a_llama_s_interleaved_rows_are_in_canonical_order(tiny_llama: Path, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "llama.gguf", tiny_llama, encoding="Q8_0")
    checkpoint = open_checkpoint(tmp_path / "llama.gguf")
    name = "layers.1.attn.k.weight"
    assert checkpoint.weight(name).entry.interleaved_heads == 2
    assert (CanonicalWeights(checkpoint).linear(name).values() == checkpoint.weight(name).f32()).all()


def test_the_digest_depends_on_every_number(folder: Path, tmp_path: Path) -> None:
    path = quantised(folder, "Q4_1")
    digest = CanonicalWeights(open_checkpoint(path)).digest()
    assert CanonicalWeights(open_checkpoint(quantised(folder, "Q4_0"))).digest() != digest
    copy = tmp_path / "copy.gguf"
    data = bytearray(path.read_bytes())
    copy.write_bytes(data)
    assert CanonicalWeights(open_checkpoint(copy)).digest() == digest
    data[-1] ^= 1
    copy.write_bytes(data)
    assert CanonicalWeights(open_checkpoint(copy)).digest() != digest


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_numbers_without_scales_are_refused_with_the_way_out(folder: Path, encoding: str) -> None:
    wanted = rf"tensor embed.weight is stored as {encoding}; .* takes Q4_0, .*Q6_K: `muser model quantize --to q8_0"
    with pytest.raises(CheckpointError, match=wanted):
        CanonicalWeights(open_checkpoint(quantised(folder, encoding)))


def test_sizes_that_the_groups_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "odd", hidden=64, ffn=80, head_dim=16)
    with pytest.raises(CheckpointError, match="ffn_size is 80, which is no multiple of 32"):
        CanonicalWeights(open_checkpoint(tmp_path / "odd"))


def test_a_scale_that_is_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    data = bytearray(quantised(folder, "Q8_0").read_bytes())
    # The last tensor is the head, of 34 bytes a block, and a block begins with its scale.
    data[-34:-32] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    weights = CanonicalWeights(open_checkpoint(path))
    with pytest.raises(CheckpointError, match=r"broken\.gguf: tensor output\.weight has a scale that is not finite"):
        weights.digest()


def test_a_norm_s_multiplier_that_is_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    """NaN in a norm would be NaN in one library and some integer in another: it is no input of the lane."""
    path, name = tmp_path / "broken.gguf", "final_norm.weight"
    wanted = open_checkpoint(quantised(folder, "Q8_0")).weight(name).f32().tobytes()
    data = bytearray(quantised(folder, "Q8_0").read_bytes())
    at = data.find(wanted)
    assert at > 0
    data[at + len(wanted) - 4 : at + len(wanted)] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"broken\.gguf: tensor final_norm\.weight has a number that is not finite"
    ):
        CanonicalWeights(open_checkpoint(path)).digest()


@pytest.mark.parametrize(
    "small", [{"norm_eps": 1e-13}, {"post_norm_eps": 1e-13}, {"qk_norm": QKNorm(weighted=False, eps=1e-13)}]
)
def test_an_eps_that_lets_subnormals_matter_is_refused(folder: Path, small: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(quantised(folder, "Q8_0"))
    check_spec(checkpoint)
    checkpoint.spec = replace(checkpoint.spec, **small)
    with pytest.raises(CheckpointError, match=r"eps is 1e-13: the reference lane needs at least"):
        check_spec(checkpoint)
