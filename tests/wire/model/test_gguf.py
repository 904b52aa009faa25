from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muser_wire.errors import CheckpointError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.gguf import open_gguf, read_gguf_fields
from muser_wire.model.tiny import write_tiny_llama
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.model.tokenizer import load_tokenizer


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(fields: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors)
    return head + b"\0" * (-len(head) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder, layers=1, hidden=32, ffn=32, heads=2, kv_heads=1, head_dim=16, vocab=260)
    write_tiny_gguf(folder / "tiny.gguf", folder, encoding="Q4_1")
    return (folder / "tiny.gguf").read_bytes()


def test_every_type_of_value_is_read(write: Callable[[bytes], Path]) -> None:
    fields = [
        field("u8", 0, b"\xff"),
        field("i8", 1, b"\xff"),
        field("u16", 2, b"\xff\xff"),
        field("i16", 3, b"\xfe\xff"),
        field("u32", 4, struct.pack("<I", 2**32 - 1)),
        field("i32", 5, struct.pack("<i", -7)),
        field("f32", 6, struct.pack("<f", 0.5)),
        field("bool", 7, b"\x01"),
        field("text", 8, text("h\u00e9")),
        field("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
        field("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        field("none", 9, struct.pack("<IQ", 8, 0)),
        field("u64", 10, struct.pack("<Q", 2**64 - 1)),
        field("i64", 11, struct.pack("<q", -(2**63))),
        field("f64", 12, struct.pack("<d", 0.1)),
    ]
    assert dict(read_gguf_fields(write(file_of(fields, []))).values) == {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 2**32 - 1, "i32": -7, "f32": 0.5, "bool": True,
        "text": "h\u00e9", "texts": ["a", ""], "numbers": [1, -2, 3], "none": [],
        "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
    }  # fmt: skip


def test_a_tensor_is_where_its_offset_says(write: Callable[[bytes], Path]) -> None:
    values = np.arange(6, dtype="<f4")
    path = write(file_of([], [entry("a", (1,), 0, 0), entry("b", (3, 2), 0, 32)], bytes(32) + values.tobytes()))
    stored = open_gguf(path).tensors["b"]
    # GGUF lists the fastest axis first.
    assert (stored.shape, stored.encoding) == ((2, 3), "F32")
    assert stored.data.tobytes() == values.tobytes()


def test_the_alignment_field_moves_the_data(write: Callable[[bytes], Path]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += field("general.alignment", 4, struct.pack("<I", 256)) + entry("a", (1,), 0, 0)
    path = write(head.ljust(256, b"\0") + struct.pack("<f", 2.5))
    assert open_gguf(path).tensors["a"].data.view("<f4")[0] == 2.5


def test_the_package_s_own_reader_agrees(tiny_gguf: bytes, write: Callable[[bytes], Path]) -> None:
    path = write(tiny_gguf)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = open_gguf(path).tensors
    assert found.keys() == expected.keys()
    for name, stored in found.items():
        assert stored.encoding == expected[name].tensor_type.name
        assert stored.shape == tuple(reversed(expected[name].shape.tolist()))
        assert stored.data.tobytes() == expected[name].data.tobytes()


def test_a_real_vocabulary_takes_less_than_a_second(smollm2: Path) -> None:
    begin = time.process_time()
    fields = read_gguf_fields(smollm2)
    assert time.process_time() - begin < 1
    tokens = fields.get("tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


ONE = struct.pack("<f", 1)
BAD = {
    "magic": (b"GGML" + bytes(20), "does not start with GGUF"),
    "version": (file_of([], [], version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "a field twice": (file_of([field("x", 0, b"1")] * 2, []), "field x is there twice"),
    "a tensor twice": (file_of([], [entry("t", (1,), 0, 0)] * 2, ONE), "tensor t is there twice"),
    "type of a field": (file_of([field("x", 13, b"")], []), "field x has the unknown type 13"),
    "array of arrays": (file_of([field("x", 9, struct.pack("<IQ", 9, 1))], []), "field x has the unknown type 9"),
    "type of a tensor": (file_of([], [entry("t", (1,), 99, 0)], ONE), "tensor t has the unknown type 99"),
    "no weights": (file_of([], [entry("t", (4,), 24, 0)], ONE), "tensor t is stored as I8"),
    "no dimensions": (file_of([], [entry("t", (), 0, 0)], ONE), "tensor t has 0 dimensions"),
    "five dimensions": (file_of([], [entry("t", (1,) * 5, 0, 0)], ONE), "tensor t has 5 dimensions"),
    "a zero size": (file_of([], [entry("t", (4, 0), 0, 0)], ONE), r"tensor t has the impossible shape \[0, 4\]"),
    "a huge size": (file_of([], [entry("t", (2**63, 2**63), 0, 0)], ONE), "impossible shape"),
    "half a block": (file_of([], [entry("t", (48,), 8, 0)], bytes(99)), "rows of 48; Q8_0 packs 32"),
    "data cut": (file_of([], [entry("t", (4,), 0, 0)], ONE), "tensor t needs bytes .* cut short"),
    "offset outside": (file_of([], [entry("t", (1,), 0, 2**63)], ONE), "tensor t needs bytes"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announced"),
    "many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "announced"),
    "many texts": (file_of([field("x", 9, struct.pack("<IQ", 8, 2**60))], []), "entries of x are announced"),
    "many numbers": (file_of([field("x", 9, struct.pack("<IQ", 10, 2**61))], []), "entries of x are announced"),
    "a long text in a list": (
        file_of([field("x", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**63))], []),
        "cut short",
    ),
    "half a length in a list": (
        file_of([field("x", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 0))], [])[:-12],
        "announced",
    ),
    "a long name": (file_of([struct.pack("<Q", 2**63) + bytes(8)], []), "cut short"),
    "a long text": (file_of([field("x", 8, struct.pack("<Q", 2**64 - 1))], []), "cut short"),
    "not UTF-8": (file_of([field("x", 8, struct.pack("<Q", 1) + b"\xff")], []), "not UTF-8"),
    "alignment": (file_of([field("general.alignment", 4, struct.pack("<I", 48))], []), "expected a power of two"),
    "alignment zero": (file_of([field("general.alignment", 4, bytes(4))], []), "general.alignment is 0"),
    "split": (file_of([field("split.count", 2, b"\x02\x00")], []), "split.count is 2"),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_by_name(write: Callable[[bytes], Path], content: bytes, problem: str) -> None:
    path = write(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tiny_gguf: bytes, write: Callable[[bytes], Path]) -> None:
    padding = len(tiny_gguf) - len(tiny_gguf.rstrip(b"\0"))
    last = len(tiny_gguf) - padding - 1
    for length in [*range(300), *range(300, last, 97), last]:
        with pytest.raises(CheckpointError):
            open_gguf(write(tiny_gguf[:length]))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gives_no_other_error(tiny_gguf: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 12_000))
        content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    for reader in (open_checkpoint, load_tokenizer):
        with contextlib.suppress(CheckpointError):
            reader(path)


def nvfp4_file(*scales: tuple[str, tuple[int, ...], float]) -> bytes:
    """Two NVFP4 matrices [1, 64], each with every code 1 (0.5) and block scales 1, and F32 tensors beside them."""
    block = bytes([0x38] * 4 + [0x11] * 32)
    entries = [entry("a.weight", (64, 1), 40, 0), entry("b.weight", (64, 1), 40, 64)]
    data = block.ljust(64, b"\0") * 2
    for name, shape, value in scales:
        entries.append(entry(name, shape, 0, len(data)))
        data += np.full(shape, value, "<f4").tobytes().ljust(32, b"\0")
    return file_of([], entries, data)


def test_nvfp4_is_multiplied_by_its_scale(write: Callable[[bytes], Path]) -> None:
    both = nvfp4_file(("a.scale", (1,), 3.0), ("b.scale", (1,), 0.25))
    tensors = open_gguf(write(both)).tensors
    assert set(tensors) == {"a.weight", "b.weight"}
    assert tensors["a.weight"].f32(0, 1).tolist() == [[1.5] * 64]
    assert tensors["b.weight"].f32(0, 1).tolist() == [[0.125] * 64]
    assert (tensors["a.weight"].tensor_scale, tensors["a.weight"].encoding) == (3.0, "NVFP4")


def test_nvfp4_made_without_scales_has_none(write: Callable[[bytes], Path]) -> None:
    tensors = open_gguf(write(nvfp4_file())).tensors
    assert tensors["a.weight"].f32(0, 1).tolist() == [[0.5] * 64]
    assert tensors["a.weight"].tensor_scale is None


def test_one_missing_scale_of_nvfp4_is_named(write: Callable[[bytes], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor b\.weight is quantised, and its b\.scale is missing"):
        open_gguf(write(nvfp4_file(("a.scale", (1,), 3.0))))
    with pytest.raises(CheckpointError, match=r"a\.scale has shape \[2\]; expected one number"):
        open_gguf(write(nvfp4_file(("a.scale", (2,), 3.0), ("b.scale", (1,), 1.0))))
