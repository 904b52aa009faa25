"""A node's command line, small, with every kind of flag that the real ones have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from muser_wire.flags import seconds, whole
from muser_wire.settings.keys import Keys, declare
from muser_wire.settings.settings import Settings


def rate(text: str) -> float:
    """Like the producer's: a number with or without k, M, G."""
    units = {"k": 1e3, "M": 1e6, "G": 1e9}
    number = text[:-1] if text[-1:] in units else text
    if not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no rate")
    return float(number) * units.get(text[-1:], 1.0)


def command_line() -> tuple[argparse.ArgumentParser, Keys]:
    top = argparse.ArgumentParser(prog="node")
    serve = top.add_subparsers(dest="command").add_parser("serve")
    serve.add_argument("--loose", help="a flag of no group")
    model = serve.add_argument_group("model")
    model.add_argument("--model", type=Path, required=True)
    model.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    network = serve.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1")
    network.add_argument("-p", "--port", type=whole(0, 65535), default=4949, help="default: %(default)s")
    network.add_argument("--peer", action="append", default=[])
    network.add_argument("--max-rate", type=rate, default=0.0)
    network.add_argument("--open", action=argparse.BooleanOptionalAction, default=False)
    process = serve.add_argument_group("process")
    process.add_argument("--drain-s", type=seconds, default=30.0)
    process.add_argument("--api-token", help="a secret")
    process.add_argument("--api-key", type=Path, help="the file of one")
    return top, declare(serve, "prefill")


Read = Callable[..., Settings]


@pytest.fixture
def keys() -> Keys:
    return command_line()[1]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write the node's file in its MUSER_HOME."""

    def write(text: str) -> Path:
        (tmp_path / "prefill.toml").write_text(text)
        return tmp_path / "prefill.toml"

    return write


@pytest.fixture
def settings(tmp_path: Path) -> Read:
    """Return the settings of a command line and of variables, with `tmp_path` as MUSER_HOME."""

    def settings(*flags: str, config: str | None = None, **variables: str) -> Settings:
        top, keys = command_line()
        return Settings(keys, keys.given(top, ["serve", *flags]), variables, tmp_path, config)

    return settings
