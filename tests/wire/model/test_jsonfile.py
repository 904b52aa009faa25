from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.jsonfile import parse_object, read_bounded, read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": {"b": [1, null]}}')
    assert read_object(tmp_path / "a.json") == {"a": {"b": [1, None]}}


@pytest.mark.parametrize("text", [b"", b"{", b"nope", b"\xff", b"[" * 100_000, b"1" * 5000, b'{"a":1,"a":1}', b'"x"'])
def test_anything_else_is_refused_with_the_file_s_name(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^some.json: "):
        parse_object(Path("some.json"), text)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent cannot be read: No such file"):
        read_object(tmp_path / "absent")
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(CheckpointError, match="large has 11 bytes; such a file has at most 10"):
        read_bounded(tmp_path / "large", 10)
