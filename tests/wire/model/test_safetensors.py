from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.digest import weights_digest
from muser_wire.model.safetensors import open_folder, read_safetensors
from muser_wire.model.tiny import safetensors_bytes, write_tiny_llama


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        return path

    return write


def test_tensors_and_metadata(write: Callable[[bytes], Path]) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(offsets=(8, 16)), "a": entry("BF16", (2, 2), (0, 8))}
    found = read_safetensors(write(file_of(header, bytes(range(16)))))
    assert found.keys() == {"a", "b"}
    assert (found["a"].encoding, found["a"].shape, found["a"].data.tobytes()) == ("BF16", (2, 2), bytes(range(8)))
    assert found["b"].data.tobytes() == bytes(range(8, 16))


BAD = {
    "no header": (b"1234", "4 bytes: too short"),
    "header cut": (file_of({"a": entry()})[:20], "header claims .* cut short"),
    "header too long": ((2**40).to_bytes(8, "little") + bytes(8), "header claims 1099511627776 bytes, at most"),
    "not JSON": (file_of(b"{nonsense"), "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "nested too deep": (file_of(b"[" * 100_000), "not valid JSON"),
    "not an object": (file_of([1]), "expected a JSON object, found list"),
    "a key twice": (file_of(b'{"a": {"x": 1, "x": 2}}'), "key 'x' is there twice"),
    "entry": (file_of({"a": 1}), "entry of tensor a is not an object"),
    "no shape": (file_of({"a": entry(shape=None)}, bytes(8)), "tensor a has a malformed shape"),
    "negative shape": (file_of({"a": entry(shape=[-2])}, bytes(8)), "tensor a has a malformed shape"),
    "true shape": (file_of({"a": entry(shape=[True, 2])}, bytes(8)), "tensor a has a malformed shape"),
    "zero shape": (file_of({"a": entry(shape=[0], offsets=(0, 0))}), r"impossible shape \[0\]"),
    "huge shape": (file_of({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "impossible shape"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 9)}, bytes(4)), "9 dimensions"),
    "one offset": (file_of({"a": entry(offsets=[0])}, bytes(8)), "malformed shape or data_offsets"),
    "float offset": (file_of({"a": entry(offsets=[0, 8.0])}, bytes(8)), "malformed shape or data_offsets"),
    "dtype": (file_of({"a": entry("F7", (8,))}, bytes(8)), "tensor a is stored as F7"),
    "size": (file_of({"a": entry(shape=[3])}, bytes(8)), r"tensor a F32 \[3\] takes 12 bytes, its data_offsets give 8"),
    "backwards": (file_of({"a": entry(offsets=(8, 0))}, bytes(8)), "takes 8 bytes, its data_offsets give -8"),
    "data cut": (file_of({"a": entry()}, bytes(7)), "tensor a needs bytes .* cut short"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "tensor b starts at data byte 4"),
    "gap": (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), "tensor a starts at data byte 4, expected 0"),
    "too much data": (file_of({"a": entry()}, bytes(9)), "take 8 bytes of data, the file has 9"),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_by_name(write: Callable[[bytes], Path], content: bytes, problem: str) -> None:
    path = write(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gives_no_other_error(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(file_of({"a": entry(), "b": entry("F16", (4, 1), (8, 16))}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(CheckpointError):
        read_safetensors(path)


def shard(folder: Path, out: Path, *, index: bool) -> None:
    """Write the checkpoint in `folder` as two files, odd tensors in the second."""
    out.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())
    tensors = read_safetensors(folder / "model.safetensors")
    parts: list[dict[str, np.ndarray]] = [{}, {}]
    for i, (name, stored) in enumerate(tensors.items()):
        parts[i % 2][name] = stored.data.view("<f4").reshape(stored.shape)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, parts, strict=True):
        (out / file).write_bytes(safetensors_bytes(part, "F32"))
    if index:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint(tiny_llama: Path, tmp_path: Path, index: bool) -> None:
    shard(tiny_llama, tmp_path / "sharded", index=index)
    sharded, single = open_checkpoint(tmp_path / "sharded"), open_checkpoint(tiny_llama)
    assert sharded.names() == single.names()
    assert weights_digest(sharded) == weights_digest(single)


def test_a_missing_shard_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    shard(tiny_llama, tmp_path / "sharded", index=True)
    (tmp_path / "sharded" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing"):
        open_folder(tmp_path / "sharded")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "", "..", None, 3])
def test_an_index_cannot_lead_out_of_the_folder(tiny_llama: Path, tmp_path: Path, name: object) -> None:
    shard(tiny_llama, tmp_path / "sharded", index=True)
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match=r"not a plain file name|is missing"):
        open_folder(tmp_path / "sharded")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_without_a_map_is_refused(tiny_llama: Path, tmp_path: Path, content: str) -> None:
    shard(tiny_llama, tmp_path / "sharded", index=True)
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="weight_map is missing or empty"):
        open_folder(tmp_path / "sharded")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, layers=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"b.safetensors: tensor .* is also in a.safetensors"):
        open_folder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no .safetensors file"):
        open_folder(tmp_path)
