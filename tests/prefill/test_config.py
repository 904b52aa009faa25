from __future__ import annotations

import argparse
import sys

import pytest

from muser_prefill.config import PrefillConfig, add_arguments, from_arguments, rate
from muser_wire.errors import LocalProtocolError, NumericsMismatch
from muser_wire.geometry import ElementType
from muser_wire.numerics import Lane


def parsed(*flags: str) -> PrefillConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", "m.gguf", *flags]))


def test_defaults_are_those_of_the_documentation() -> None:
    config = parsed()
    assert (config.host, config.control_port, config.data_port) == ("127.0.0.1", 4950, 4951)
    assert (config.dtype, config.kv_element) == ("bf16", ElementType.BF16)
    assert config.chunk_tokens == 2048
    assert config.cache_memory_mb == 1024
    assert parsed("--cache-memory-mb", "0").cache_memory_mb == 0


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


def test_metrics_are_given_out_only_when_asked_for_and_on_loopback_unless_told() -> None:
    assert (parsed().metrics_port, parsed().metrics_host) == (None, "127.0.0.1")
    assert parsed("--metrics-port", "0").metrics_port == 0
    assert parsed("--metrics-port", "9400", "--metrics-host", "::").metrics_host == "::"


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
        ("--metrics-port", "65536"),
        ("--log-format", "xml"),
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


def test_the_lane_is_native_unless_told() -> None:
    assert parsed().lane is Lane.NATIVE
    reference = parsed("--lane", "reference")
    assert (reference.lane, reference.dtype, reference.kv_element) == (Lane.REFERENCE, None, ElementType.F16)
    assert parsed("--lane", "reference", "--kv", "f16") == reference


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--dtype", "bf16"), "--dtype bf16 is of the native lane"),
        (("--dtype", "f32", "--kv", "f16"), "--dtype f32 is of the native lane"),
        (("--kv", "bf16"), "the reference lane stores keys and values as f16, not bf16"),
    ],
)
def test_what_the_reference_lane_does_not_have_is_refused_by_name(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(NumericsMismatch, match=reason):
        parsed("--lane", "reference", *flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_producer_that_nobody_reaches_is_not_announced(host: str) -> None:
    with pytest.raises(LocalProtocolError, match="no other machine reaches"):
        parsed("--host", host, "--announce")


def test_announcing_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--host", "192.0.2.1", "--announce").announce
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(LocalProtocolError, match=r"muser\[discovery\]"):
        parsed("--host", "192.0.2.1", "--announce")
