from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint, rotate_half_rows
from muser_wire.model.safetensors import read_safetensors
from muser_wire.model.tiny import safetensors_bytes, write_tiny_llama
from muser_wire.model.tiny_gguf import write_tiny_gguf

PARTS = ["attn_norm", "attn.q", "attn.k", "attn.v", "attn.o", "mlp_norm", "mlp.gate", "mlp.up", "mlp.down"]


@pytest.fixture(scope="module")
def as_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def as_gguf(encoding: str) -> Path:
        path = folder / f"{encoding}.gguf"
        if not path.exists():
            write_tiny_gguf(path, tiny_llama, encoding=encoding)
        return path

    return as_gguf


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {
        name: stored.data.view("<f4").reshape(stored.shape).copy() for name, stored in read_safetensors(path).items()
    }
    change(tensors)
    path.write_bytes(safetensors_bytes(tensors, "F32"))


def test_names_are_in_canonical_order(tiny_llama: Path) -> None:
    layers = [f"layers.{i}.{part}.weight" for i in range(6) for part in PARTS]
    assert list(open_checkpoint(tiny_llama).names()) == ["embed.weight", *layers, "final_norm.weight", "head.weight"]


def test_a_tied_model_has_no_head(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, layers=1, tied=True)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names()[-1] == "final_norm.weight"
    with pytest.raises(CheckpointError, match=r"no tensor head\.weight"):
        checkpoint.weight("head.weight")


def test_shapes_and_sizes(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    expected = {
        "embed.weight": (512, 64),
        "layers.3.attn.q.weight": (64, 64),
        "layers.3.attn.v.weight": (32, 64),
        "layers.3.mlp.gate.weight": (96, 64),
        "layers.3.mlp.down.weight": (64, 96),
        "final_norm.weight": (64,),
    }
    for name, shape in expected.items():
        weight = checkpoint.weight(name)
        assert (weight.name, weight.shape, weight.f32().shape) == (name, shape, shape)
        assert weight.nbytes == 4 * weight.count == 4 * int(np.prod(shape))
        assert weight.encoding == "F32"


def test_f32_is_a_copy_that_may_be_written(tiny_llama: Path) -> None:
    weight = open_checkpoint(tiny_llama).weight("final_norm.weight")
    values = weight.f32()
    values[:] = 0
    assert weight.f32().any()


def test_rotate_half_rows_of_two_heads() -> None:
    assert rotate_half_rows(heads=2, head_dim=4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_gguf_gives_the_same_values_with_queries_and_keys_in_rotate_half_order(
    tiny_llama: Path, as_gguf: Callable[[str], Path]
) -> None:
    folder, file = open_checkpoint(tiny_llama), open_checkpoint(as_gguf("F32"))
    assert folder.names() == file.names()
    for name in folder.names():
        np.testing.assert_array_equal(file.weight(name).f32(), folder.weight(name).f32(), err_msg=name)
    # The file itself holds another order, or this test would prove nothing.
    stored = file.weight("layers.0.attn.q.weight").stored.data.view("<f4").reshape(64, 64)
    assert not np.array_equal(stored, folder.weight("layers.0.attn.q.weight").f32())
    # Row 1 of an interleaved head is the partner of row 0: row 8 of 16 in rotate-half order.
    np.testing.assert_array_equal(stored[1], folder.weight("layers.0.attn.q.weight").f32()[8])


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_packed_rows_are_in_the_order_of_dense_rows(as_gguf: Callable[[str], Path], encoding: str) -> None:
    checkpoint = open_checkpoint(as_gguf(encoding))
    assert checkpoint.encoding == encoding
    for name in ("layers.0.attn.q.weight", "layers.2.attn.k.weight", "layers.2.attn.v.weight", "embed.weight"):
        weight = checkpoint.weight(name)
        packed = weight.affine()
        assert packed is not None
        values = packed.q * np.repeat(packed.scales, 32, 1) + np.repeat(packed.offsets, 32, 1)
        np.testing.assert_array_equal(values, weight.f32())
        assert packed.q.flags.c_contiguous
    assert checkpoint.weight("final_norm.weight").affine() is None


def test_the_encoding_shown_is_that_of_most_weights(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.encoding == "Q4_1"
    assert checkpoint.weight("embed.weight").encoding == "Q8_0"
    assert len(checkpoint.names()) == 272


def refused(path: Path, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_path_that_does_not_exist_is_named_with_what_to_do(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.gguf", "does not exist.*muser model fetch smollm2")


def test_an_empty_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "is empty.*fetch it again")


def test_a_folder_without_a_config_is_named_with_what_to_do(tmp_path: Path) -> None:
    refused(tmp_path, r"no config\.json.*muser model fetch smollm2")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(tmp_path / "model.bin", "neither a GGUF file nor a folder")


def test_a_folder_with_an_empty_weights_file_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is empty"):
        open_checkpoint(copy)


def test_an_unknown_model_type_lists_the_known_ones(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    known = "llama, mistral, qwen3, gemma3, gemma3_text, muse_glimmer, muse_glimmer_text"
    refused(copy, rf"model_type is 'mamba', which is not known here \(known: {known}\)")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path, as_gguf: Callable[[str], Path]) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(as_gguf("F32").read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    refused(
        path, r"general\.architecture is 'mamba', which is not known here \(known: llama, qwen3, gemma3, muse-glimmer\)"
    )


def test_missing_tensors_are_named(copy: Path) -> None:
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".3." in name] and None)
    refused(copy, r"missing tensors model\.layers\.3\.input_layernorm\.weight, .* and 5 more")


def test_an_extra_tensor_is_named(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}))
    refused(copy, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias not part of this model")


def test_a_misshapen_tensor_is_named_with_both_shapes(copy: Path) -> None:
    def cut(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:95]

    rewrite(copy, cut)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[95, 64\], expected \[96, 64\]"
    ):
        open_checkpoint(copy)


def test_a_truncated_weights_file_is_named(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* cut short, fetch it again"):
        open_checkpoint(copy)


def test_a_truncated_gguf_is_named(tmp_path: Path, smollm2: Path) -> None:
    with smollm2.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(3_000_000))
    refused(tmp_path / "cut.gguf", "tensor token_embd.weight needs bytes .* cut short, fetch it again")


def test_a_folder_that_may_not_be_read_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Permission denied"):
        open_checkpoint(copy)


def test_checkpoints_of_one_file_are_independent(tiny_llama: Path) -> None:
    first, second = open_checkpoint(tiny_llama), open_checkpoint(tiny_llama)
    assert isinstance(first, Checkpoint)
    assert first.spec == second.spec
    assert first.path == tiny_llama
