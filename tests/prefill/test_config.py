from __future__ import annotations

import argparse

import pytest

from muser_prefill.config import PrefillConfig, add_arguments, from_arguments, rate
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
    assert parsed("--dtype", "f32").kv_element is ElementType.BF16
    assert parsed("--dtype", "f32", "--kv", "f16").kv_element is ElementType.F16


def test_an_unknown_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--dtype", "f64")
    assert "f64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "bytes_a_second"), [("0", 0), ("1500", 1500), ("64k", 64e3), ("500M", 5e8), ("1.1G", 1.1e9), ("0.5G", 5e8)]
)
def test_a_rate_is_bytes_a_second(text: str, bytes_a_second: float) -> None:
    assert rate(text) == pytest.approx(bytes_a_second)
    assert parsed("--max-rate", text).max_rate == pytest.approx(bytes_a_second)


@pytest.mark.parametrize(
    "text", ["", "G", "fast", "-1", "1.1GB", "1Gb", "10Gbit", "1K", "1g", "1e9", "1_000", "1.", ".5", "nan", "1 G"]
)
def test_every_other_spelling_of_a_rate_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--max-rate={text}")
    assert "no number of bytes a second" in capsys.readouterr().err


def test_nothing_is_paced_unless_asked_for() -> None:
    assert parsed().max_rate == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--control-port", "99999"),
        ("--data-port", "x"),
        ("--chunk-tokens", "0"),
        ("--threads", "-3"),
        ("--max-waiting", "-1"),
        ("--drain-s", "-1"),
        ("--ready-file", "/nowhere/at/all.json"),
        ("--trace", "/nowhere/at/all.jsonl"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_flags_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(f"{flag}={value}")
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err
