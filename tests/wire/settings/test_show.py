from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from muser_wire.settings.settings import Settings
from muser_wire.settings.show import show, toml_value

Write = Callable[[str], Path]
Make = Callable[..., Settings]


def test_every_value_is_shown_with_where_it_came_from(write: Write, settings: Make) -> None:
    path = write('[network]\npeer = ["a", "b"]\n[process]\ndrain_s = 5\n')
    lines = show(settings("--port", "80", MUSER_PREFILL_HOST="::1").read()).splitlines()
    said = {line.partition("  #")[0].rstrip(): line.partition("  # ")[2] for line in lines if "  # " in line}
    assert said["port = 80"] == "flag --port"
    assert said['host = "::1"'] == "environment MUSER_PREFILL_HOST"
    assert said['peer = ["a", "b"]'] == f"{path}:2"
    assert said["drain_s = 5.0"] == f"{path}:4"
    assert said['dtype = "bf16"'] == "default"
    assert "MUSER_PREFILL_MODEL" in said["# model is not set"]


def test_secrets_are_hidden_and_paths_to_them_are_not(write: Write, settings: Make) -> None:
    write("[process]\napi_token = 'S3CRET'\napi_key = '/keys/file'\n")
    text = show(settings().read())
    assert "S3CRET" not in text
    assert "(hidden)" in text
    assert 'api_key = "/keys/file"' in text


def test_what_is_shown_is_a_file_that_gives_the_same(write: Write, settings: Make, tmp_path: Path) -> None:
    flags = ["--model", '/a "b"\\c/ü', "--port", "1", "--peer", "x:1", "--peer", "y", "--open", "--max-rate", "1.5G"]
    before = settings(*flags).read()
    text = show(before)
    assert tomllib.loads(text)["network"]["port"] == 1
    write(text)
    assert settings().read().namespace() == before.namespace()


def test_a_path_that_was_typed_somewhere_is_shown_as_the_file_it_is(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = show(settings("--model", "m.gguf").read())
    assert tomllib.loads(text)["model"]["model"] == str(tmp_path / "m.gguf")


def test_values_are_spelled_as_toml_has_them() -> None:
    for value in ("", 'a"b\\c\n\t\x7f\u2028ü', True, 3, 2.5, 1e300, ["a", "b"]):
        assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value
