"""What a GGUF file says of a family: read back, it is the model that was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from muser_wire.model.checkpoint import open_checkpoint, rotate_half_rows
from muser_wire.model.gguf_conventions import interleaved
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3", "muse_glimmer"])
def test_a_family_s_fields_give_its_spec(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "tiny", layers=4)
    write_tiny_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert open_checkpoint(tmp_path / "tiny.gguf").spec == open_checkpoint(tmp_path / "tiny").spec


def test_rows_are_interleaved_and_back() -> None:
    rows = np.arange(24, dtype=np.float32)[:, None]
    stored = interleaved(rows, 2)
    assert stored[:4, 0].tolist() == [0, 6, 1, 7]
    assert (stored[rotate_half_rows(2, 12)] == rows).all()
