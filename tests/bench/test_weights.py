from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.driver import BenchError
from bench.weights import reencode
from muser_wire.model.gguf import open_gguf

MATRIX = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
VECTOR = np.arange(5, dtype=np.float32)


def write_gguf(path: Path, alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "norm", "matrix"])
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_tensor("norm", VECTOR)
    writer.add_tensor("matrix", MATRIX)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Half a step of each encoding: 8 signed bits, 4 bits, the 8-bit mantissa of bf16, for magnitudes up to 4.
@pytest.mark.parametrize(("encoding", "error"), [("Q8_0", 4 / 127 / 2), ("Q4_0", 4 / 8), ("BF16", 2 * 2.0**-8)])
def test_matrices_are_reencoded_and_the_rest_is_kept(encoding: str, error: float, tmp_path: Path) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    write_gguf(source)
    reencode(source, target, encoding)
    before, after = open_gguf(source), open_gguf(target)
    assert after.fields.text("general.architecture") == before.fields.text("general.architecture") == "llama"
    norm, matrix = after.tensors["norm"], after.tensors["matrix"]
    assert (norm.encoding, matrix.encoding) == ("F32", encoding)
    assert norm.data.tobytes() == VECTOR.tobytes()
    kind = gguf.GGMLQuantizationType[encoding]
    values = gguf.quants.dequantize(matrix.data.reshape(6, -1), kind)
    assert 0 < np.abs(values - MATRIX).max() <= error


def test_an_unusual_alignment_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "source.gguf", alignment=64)
    with pytest.raises(BenchError, match="alignment"):
        reencode(tmp_path / "source.gguf", tmp_path / "target.gguf", "Q8_0")
