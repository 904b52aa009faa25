"""What a decode node says of itself without being started: the kernels that it would use."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from muser_decode import facts
from muser_decode.config import add_arguments, from_arguments
from muser_wire.model.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(
    ("compiler", "kernels", "refused"),
    [(None, ["exact.decoder.compiled"], ""), ("no-such-compiler", [], "name=exact.decoder.compiled cause=no C++")],
)
def test_kernels_of_the_reference_lane_are_named_and_so_are_refusals(
    compiler: str | None,
    kernels: list[str],
    refused: str,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_llama, encoding="Q8_0")
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", str(tmp_path / "tiny.gguf"), "--lane", "reference"]
    found = facts.model(from_arguments(parser.parse_args(flags), on_gpu=False))
    assert found["kernels"] == kernels
    assert "".join(found["refused"]).startswith(refused)
    assert bool(found["refused"]) == bool(refused)
