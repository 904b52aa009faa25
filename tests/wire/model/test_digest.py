from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

from muser_wire.model import digest as digest_module
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.tiny import write_tiny, write_tiny_llama
from muser_wire.model.tiny_families import TINY_FAMILIES
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.model.tokenizer import load_tokenizer


def test_the_digest_is_sha256_of_names_shapes_and_values(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, layers=1, tied=True)
    checkpoint = open_checkpoint(tmp_path)
    text = b""
    for part in (b"muser weights 1",):
        text += len(part).to_bytes(8, "little") + part
    for name in checkpoint.names():
        values = checkpoint.weight(name).f32()
        shape = np.array(values.shape, "<u8").tobytes()
        for part in (name.encode(), shape, values.astype("<f4").tobytes()):
            text += len(part).to_bytes(8, "little") + part
    assert weights_digest(checkpoint) == hashlib.sha256(text).digest()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_one_model_has_one_identity_in_both_containers(tmp_path: Path, tied: bool, dtype: str) -> None:
    write_tiny_llama(tmp_path / "hf", layers=2, tied=tied, dtype=dtype)
    write_tiny_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    folder, file = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    assert folder.spec == file.spec
    assert folder.spec.digest() == file.spec.digest()
    assert weights_digest(folder) == weights_digest(file)
    assert load_tokenizer(tmp_path / "hf").digest() == load_tokenizer(tmp_path / "model.gguf").digest()


@pytest.mark.parametrize("layers", [6, 7])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_has_one_identity_in_both_containers(tmp_path: Path, family: str, layers: int) -> None:
    write_tiny(family, tmp_path / "hf", layers=layers)
    if family == "llama3":
        # A GGUF file can express the published stretching only.
        path = tmp_path / "hf" / "config.json"
        config = json.loads(path.read_text())
        config["rope_scaling"]["original_max_position_embeddings"] = 8192
        path.write_text(json.dumps(config))
    write_tiny_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    folder, file = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    assert folder.spec == file.spec
    assert folder.spec.digest() == file.spec.digest()
    assert folder.names() == file.names()
    assert weights_digest(folder) == weights_digest(file)
    assert load_tokenizer(tmp_path / "hf").digest() == load_tokenizer(tmp_path / "model.gguf").digest()


def test_a_weight_is_hashed_the_same_in_slices(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", tiny_llama)
    whole = weights_digest(open_checkpoint(tiny_llama))
    monkeypatch.setattr(digest_module, "SLICE_COUNT", 7 * 64)
    assert (
        weights_digest(open_checkpoint(tiny_llama)) == weights_digest(open_checkpoint(tmp_path / "model.gguf")) == whole
    )


def test_one_changed_bit_changes_the_digest(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, layers=1)
    before = weights_digest(open_checkpoint(tmp_path))
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_digest(open_checkpoint(tmp_path)) != before


def test_other_weights_of_the_same_shape_have_another_digest(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "a", layers=1, seed=0)
    write_tiny_llama(tmp_path / "b", layers=1, seed=1)
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert a.spec.digest() == b.spec.digest()
    assert weights_digest(a) != weights_digest(b)


def test_a_real_model_is_hashed_in_seconds(smollm2: Path) -> None:
    begin = time.process_time()
    digest = weights_digest(open_checkpoint(smollm2))
    assert time.process_time() - begin < 6
    assert digest.hex() == "1548b747c4d2ea926e03429de9369b4c75a3b121dfe1a9a3e933cb7dde23c121"


def test_the_real_gemma_is_hashed_in_seconds(gemma3_270m: Path) -> None:
    begin = time.process_time()
    digest = weights_digest(open_checkpoint(gemma3_270m))
    assert time.process_time() - begin < 20
    assert digest.hex() == "6dfe4aa1ea692b54f07582cec65fd6336f42d3045ea27dbd9dc37130be85121a"
