from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from muser_decode.config import ConfigError, DecodeConfig, ProducerAddress, add_arguments, from_arguments
from muser_decode.decoder import MlxDecoder
from muser_decode.numerics import DTYPES
from muser_decode.router import RoutePolicy
from muser_wire.errors import NumericsMismatch
from muser_wire.geometry import ElementType
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.numerics import Lane


def parsed(*flags: str, on_gpu: bool = False) -> DecodeConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", "m.gguf", *flags]), on_gpu=on_gpu)


def test_defaults_are_those_of_the_documentation() -> None:
    config = parsed()
    assert (config.host, config.port, config.producers) == ("127.0.0.1", 4949, ())
    assert (config.model, config.model_id) == (Path("m.gguf"), "m")
    assert (config.route, config.chunk_tokens) == (RoutePolicy.AUTO, 2048)


@pytest.mark.parametrize(
    ("dtype", "element"), [("f32", ElementType.BF16), ("f16", ElementType.F16), ("bf16", ElementType.BF16)]
)
def test_the_element_type_follows_the_compute_type(dtype: str, element: ElementType) -> None:
    assert parsed("--dtype", dtype).kv_element is element
    assert parsed("--dtype", dtype, "--kv", "f16").kv_element is ElementType.F16


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_default_combination_is_one_that_the_decoder_takes(
    on_gpu: bool, tmp_path: Path, tiny_llama: Path
) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, tiny_llama, encoding="Q4_1")
    for dtype in ("auto", "bf16", "f16", "f32"):
        config = parsed("--dtype", dtype, on_gpu=on_gpu)
        MlxDecoder(
            open_checkpoint(model), dtype=DTYPES[config.dtype], kv_element=config.kv_element, packed=config.packed
        )
    assert parsed(on_gpu=True).kv_element is parsed(on_gpu=False).kv_element


def test_weights_stay_packed_where_the_device_likes_it_or_the_flag_says_so() -> None:
    assert parsed("--dtype", "f16", on_gpu=True).packed
    assert not parsed(on_gpu=True).packed
    assert not parsed("--dtype", "f16", "--weights", "dense", on_gpu=True).packed
    assert not parsed().packed
    assert parsed("--weights", "packed").packed


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:5000", ProducerAddress("127.0.0.1", 5000)),
        ("localhost", ProducerAddress("localhost", 4950)),
        ("[::1]:5000", ProducerAddress("::1", 5000)),
    ],
)
def test_a_producer_is_host_and_port(text: str, address: ProducerAddress) -> None:
    assert parsed("--producer", text).producers == (address,)


def test_several_producers_keep_their_order_and_have_names() -> None:
    config = parsed("--producer", "b:1", "--producer", "[fe80::1]", "--producer", "", "--producer", "a")
    assert [address.name for address in config.producers] == ["b:1", "[fe80::1]:4950", "a:4950"]
    assert parsed("--producer", "").producers == ()


def test_a_producer_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--producer a:4950: this producer is named twice"):
        parsed("--producer", "a", "--producer", "a:4950")


def test_lines_are_for_people_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed().log_format == "console"
    assert parsed("--log-format", "json").log_format == "json"
    with pytest.raises(SystemExit):
        parsed("--log-format", "xml")
    assert "--log-format" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["host:", "host:0", "host:65536", "host:x", "host:-1", "host:\u0663"])
def test_a_port_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a port from 1 to 65535"):
        parsed("--producer", text)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--chunk-tokens", "0"),
        ("--threads", "-3"),
        ("--max-queue", "-9"),
        ("--drain-s", "-1"),
        ("--drain-s", "nan"),
        ("--ready-file", "/nowhere/at/all.json"),
        ("--trace", "/nowhere/at/all.jsonl"),
        ("--dtype", "f64"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_flags_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(f"{flag}={value}")
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


def test_memory_keeps_prompts_unless_told_otherwise_and_the_disk_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    config = parsed()
    assert (config.cache_memory_mb, config.cache_disk_mb, config.cache_dir) == (1024, 0, None)
    assert config.reuse_decoded is True
    assert parsed("--cache-memory-mb", "0").cache_memory_mb == 0
    assert parsed("--reuse-decoded", "no").reuse_decoded is False
    config = parsed("--cache-memory-mb", "500", "--cache-disk-mb", "2000", "--cache-dir", "x")
    assert (config.cache_memory_mb, config.cache_disk_mb, config.cache_dir) == (500, 2000, Path("x"))
    for text in ("-1", "1.5", "1G", ""):
        with pytest.raises(SystemExit):
            parsed("--cache-memory-mb", text)
        assert "--cache-memory-mb" in capsys.readouterr().err


def test_requests_have_a_number_a_memory_and_a_time() -> None:
    config = parsed()
    assert (config.max_batch, config.memory_mb, config.deadline_s) == (8, 0, 0.0)
    config = parsed("--max-batch", "2", "--memory-mb", "300", "--deadline-s", "1.5")
    assert (config.max_batch, config.memory_mb, config.deadline_s) == (2, 300, 1.5)
    for flag, value in (("--max-batch", "0"), ("--max-batch", "65"), ("--memory-mb", "-1"), ("--deadline-s", "-1")):
        with pytest.raises(SystemExit):
            parsed(flag, value)


def test_the_reference_lane_has_one_arithmetic_and_refuses_flags_of_the_other() -> None:
    config = parsed("--lane", "reference")
    assert (config.lane, config.dtype, config.kv_element) == (Lane.REFERENCE, None, ElementType.F16)
    assert parsed("--lane", "reference", "--kv", "f16") == config
    assert parsed().lane is Lane.NATIVE
    for flag, value in (("--dtype", "f32"), ("--weights", "packed"), ("--weights", "dense")):
        with pytest.raises(NumericsMismatch, match=f"{flag} {value} is of the native lane"):
            parsed("--lane", "reference", flag, value)
    with pytest.raises(NumericsMismatch, match="keys and values as f16, not bf16"):
        parsed("--lane", "reference", "--kv", "bf16")


@pytest.mark.parametrize(("lane", "reason"), [("native", "refused in the native lane"), ("reference", "not built yet")])
def test_a_drafter_is_refused_before_anything_is_loaded(lane: str, reason: str) -> None:
    with pytest.raises(NumericsMismatch, match=reason):
        parsed("--lane", lane, "--drafter", "d.gguf")
