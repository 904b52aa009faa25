from __future__ import annotations

import argparse

import pytest

from muser_decode import config as decode_config
from muser_prefill import config as prefill_config
from muser_wire.settings.keys import Keys, declare


def flags_of(serve: argparse.ArgumentParser) -> set[str]:
    return {
        action.dest
        for action in serve._actions
        if action.option_strings and action.dest not in {"help", "config", "print_config"}
    }


def test_every_flag_is_a_key_of_its_group(keys: Keys) -> None:
    assert {(key.section, key.name, key.flag) for key in keys.keys} == {
        ("", "loose", "--loose"),
        ("model", "model", "--model"),
        ("model", "dtype", "--dtype"),
        ("network", "host", "--host"),
        ("network", "port", "--port"),
        ("network", "peer", "--peer"),
        ("network", "max_rate", "--max-rate"),
        ("network", "open", "--open"),
        ("process", "drain_s", "--drain-s"),
        ("process", "api_token", "--api-token"),
        ("process", "api_key", "--api-key"),
    }
    assert keys.variable("max_rate") == "MUSER_PREFILL_MAX_RATE"


@pytest.mark.parametrize("module", [prefill_config, decode_config])
def test_every_flag_of_a_node_is_a_key_and_stands_in_a_table(module: object) -> None:
    top = module.parser()  # type: ignore[attr-defined]
    serve = top._subparsers._group_actions[0].choices["serve"]
    keys = serve.get_default("keys")
    assert {key.name for key in keys.keys} == flags_of(serve)
    assert all(key.section for key in keys.keys)
    assert [key.name for key in keys.keys if key.required] == ["model"]


@pytest.mark.parametrize("module", [prefill_config, decode_config])
def test_a_flag_can_say_no_to_whatever_a_file_can_say_yes_to(module: object) -> None:
    top = module.parser()  # type: ignore[attr-defined]
    keys = top.parse_args(["serve"]).keys
    switches = [key for key in keys.keys if key.is_switch]
    assert switches
    for key in switches:
        for flag, said in ((key.flag, True), (f"--no-{key.flag.removeprefix('--')}", False)):
            assert keys.given(top, ["serve", flag]) == {key.name: said}


def test_what_was_given_is_told_from_defaults_even_where_it_equals_them() -> None:
    top = argparse.ArgumentParser()
    serve = top.add_subparsers().add_parser("serve")
    serve.add_argument("--port", type=int, default=4949, help="default: %(default)s")
    serve.add_argument("--open", action="store_true")
    keys = declare(serve, "decode")
    assert keys.given(top, ["serve", "--port", "4949"]) == {"port": 4949}
    assert keys.given(top, ["serve"]) == {}
    # The parser is as it was: its help still tells the default.
    assert "default: 4949" in serve.format_help()
    assert top.parse_args(["serve"]).port == 4949


def test_a_path_to_a_secret_is_none_and_a_token_is_one(keys: Keys) -> None:
    assert {key.name for key in keys.keys if key.is_secret} == {"api_token"}
    assert {key.name for key in keys.keys if key.is_list} == {"peer"}
    assert {key.name for key in keys.keys if key.is_switch} == {"open"}
