from __future__ import annotations

import argparse

import pytest

from muser_prefill.config import PrefillConfig, add_arguments, from_arguments
from muser_wire.geometry import ElementType


def parsed(*flags: str) -> PrefillConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", "m.gguf", *flags]))


def test_defaults_are_those_of_the_documentation() -> None:
    config = parsed()
    assert (config.host, config.control_port, config.data_port) == ("127.0.0.1", 4950, 4951)
    assert (config.dtype, config.kv_element) == ("bf16", ElementType.BF16)
    assert config.chunk_tokens == 2048


def test_the_element_type_follows_the_compute_type_unless_told() -> None:
    assert parsed("--dtype", "f32").kv_element is ElementType.F16
    assert parsed("--dtype", "f32", "--kv", "bf16").kv_element is ElementType.BF16


def test_an_unknown_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--dtype", "f64")
    assert "f64" in capsys.readouterr().err
