from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model import hf_folder
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.hf_config import hf_config
from muser_wire.model.hf_folder import write_folder
from muser_wire.model.spec import LinearScaling
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_families import TINY_FAMILIES


@pytest.mark.parametrize("layers", [6, 7])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_written_folder_is_the_same_model(
    family: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 3 rows of 64: no matrix fits one, and 512 rows are no multiple."""
    monkeypatch.setattr(hf_folder, "BLOCK_NBYTES", 3 * 64 * 4)
    write_tiny(family, tmp_path / "given", layers=layers)
    given = open_checkpoint(tmp_path / "given")
    write_folder(given, tmp_path / "written")
    written = open_checkpoint(tmp_path / "written")
    assert written.spec == given.spec
    assert written.names() == given.names()
    for name in given.names():
        # A norm weight loses and gains its 1.
        np.testing.assert_allclose(written.weight(name).f32(), given.weight(name).f32(), rtol=0, atol=2e-7)


def test_the_real_weights_of_a_gguf_file_survive(smollm2: Path, tmp_path: Path) -> None:
    given = open_checkpoint(smollm2)
    write_folder(given, tmp_path)
    written = open_checkpoint(tmp_path)
    assert written.spec == given.spec
    for name in ("layers.3.attn.q.weight", "layers.29.mlp.down.weight", "final_norm.weight"):
        assert np.array_equal(written.weight(name).f32(), given.weight(name).f32())


def test_linear_stretching_is_said(tiny_llama: Path) -> None:
    spec = open_checkpoint(tiny_llama).spec
    rope = spec.layers[0].rope
    assert rope is not None
    layer = replace(spec.layers[0], rope=replace(rope, scaling=LinearScaling(4.0)))
    config = hf_config(replace(spec, layers=(layer,) * len(spec.layers)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_what_the_format_cannot_say_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    given = open_checkpoint(tiny_llama)
    for spec in (replace(given.spec, embedding_scale=2.0), replace(given.spec, family="unheard")):
        with pytest.raises(CheckpointError, match="Hugging Face"):
            write_folder(Checkpoint(given.path, spec, ()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_nested_model_keeps_its_prefix(tmp_path: Path) -> None:
    write_tiny("muse_glimmer", tmp_path / "given")
    write_folder(open_checkpoint(tmp_path / "given"), tmp_path / "written")
    data = (tmp_path / "written" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert "model.language_model.layers.0.self_attn.gate_proj.weight" in header
    assert "lm_head.weight" in header
