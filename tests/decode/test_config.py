from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from muser_decode.config import ConfigError, DecodeConfig, ProducerAddress, add_arguments, from_arguments
from muser_decode.router import RoutePolicy
from muser_wire.geometry import ElementType


def parsed(*flags: str, packed_by_default: bool = False) -> DecodeConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(["--model", "m.gguf", *flags]), packed_by_default=packed_by_default)


def test_defaults_are_those_of_the_documentation() -> None:
    config = parsed()
    assert (config.host, config.port, config.producer) == ("127.0.0.1", 4949, None)
    assert (config.model, config.model_id) == (Path("m.gguf"), "m")
    assert (config.route, config.chunk_tokens) == (RoutePolicy.AUTO, 2048)


@pytest.mark.parametrize(("dtype", "element"), [("f32", ElementType.F16), ("bf16", ElementType.BF16)])
def test_the_element_type_follows_the_compute_type(dtype: str, element: ElementType) -> None:
    assert parsed("--dtype", dtype).kv_element is element
    assert parsed("--dtype", dtype, "--kv", "bf16").kv_element is ElementType.BF16


def test_weights_stay_packed_where_the_device_likes_it_or_the_flag_says_so() -> None:
    assert parsed(packed_by_default=True).packed
    assert not parsed("--weights", "dense", packed_by_default=True).packed
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
    assert parsed("--producer", text).producer == address


@pytest.mark.parametrize("text", ["host:", "host:0", "host:65536", "host:x", "host:-1", "host:\u0663"])
def test_a_port_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a port from 1 to 65535"):
        parsed("--producer", text)
