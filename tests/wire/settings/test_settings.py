from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muser_wire.settings.errors import SettingsError
from muser_wire.settings.settings import Settings

Write = Callable[[str], Path]
Make = Callable[..., Settings]


def of(settings: Settings, name: str) -> tuple[Any, str]:
    found = next(setting for setting in settings.read().settings if setting.key.name == name)
    return found.value, found.source


def test_flag_then_variable_then_file_then_default(write: Write, settings: Make) -> None:
    path = write("[network]\n\nport = 3\n")
    both = {"MUSER_PREFILL_PORT": "2"}
    assert of(settings("--port", "1", **both), "port") == (1, "flag --port")
    assert of(settings(**both), "port") == (2, "environment MUSER_PREFILL_PORT")
    assert of(settings(), "port") == (3, f"{path}:3")
    path.unlink()
    assert of(settings(), "port") == (4949, "default")


def test_a_default_given_by_hand_still_wins(write: Write, settings: Make) -> None:
    write("[network]\nport = 3\nopen = true\n")
    assert of(settings("--port", "4949"), "port") == (4949, "flag --port")
    assert of(settings(MUSER_PREFILL_OPEN="false"), "open")[0] is False
    assert of(settings("--no-open", MUSER_PREFILL_OPEN="true"), "open") == (False, "flag --open")


def test_lists_replace_one_another_and_do_not_add_up(write: Write, settings: Make) -> None:
    write('[network]\npeer = ["a", "b"]\n')
    assert of(settings(), "peer")[0] == ["a", "b"]
    assert of(settings(MUSER_PREFILL_PEER="c,d"), "peer")[0] == ["c", "d"]
    assert of(settings("--peer", "e", "--peer", "f", MUSER_PREFILL_PEER="c"), "peer")[0] == ["e", "f"]


def test_what_is_required_may_come_from_anywhere_and_is_missed_by_name(write: Write, settings: Make) -> None:
    with pytest.raises(SettingsError) as missing:
        settings().read().namespace()
    for way in ("--model", "MUSER_PREFILL_MODEL", "model in the table [model] of prefill.toml"):
        assert way in str(missing.value)
    assert settings(MUSER_PREFILL_MODEL="m").read().namespace().model == Path("m")
    write("model.model = '/m'")
    assert settings().read().namespace().model == Path("/m")


def test_the_file_may_be_another_or_none(write: Write, settings: Make, tmp_path: Path) -> None:
    write("[network]\nport = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("[network]\nport = 4\n")
    assert of(settings(config=str(other)), "port")[0] == 4
    assert of(settings(MUSER_PREFILL_CONFIG=str(other)), "port")[0] == 4
    assert of(settings(config="none", MUSER_PREFILL_CONFIG=str(other)), "port")[0] == 4949
    assert of(settings(MUSER_PREFILL_CONFIG="none"), "port")[0] == 4949
    with pytest.raises(SettingsError, match=r"--config .*gone\.toml: there is no such file"):
        settings(config=str(tmp_path / "gone.toml")).read()
    with pytest.raises(SettingsError, match=r"MUSER_PREFILL_CONFIG .*gone\.toml: there is no such file"):
        settings(MUSER_PREFILL_CONFIG=str(tmp_path / "gone.toml")).read()


def test_a_file_that_cannot_be_looked_at_is_named(settings: Make, tmp_path: Path) -> None:
    long = "x" * 300
    for node in (settings(config=long), dataclasses.replace(settings(), home=tmp_path / long)):
        with pytest.raises(SettingsError, match="cannot be read: File name too long"):
            node.read()


def test_a_variable_that_is_none_of_this_node_s_is_refused(settings: Make) -> None:
    with pytest.raises(SettingsError, match=r"MUSER_PREFILL_PROT is none .*: perhaps MUSER_PREFILL_PORT is meant"):
        settings(MUSER_PREFILL_PROT="1").read()
    # The other node's, and those of neither, are not its business.
    settings(MUSER_DECODE_PROT="1", MUSER_HOME="/x", MUSER_SOAK_ROUNDS="3").read()


def test_a_variable_that_cannot_be_read_is_named(settings: Make) -> None:
    with pytest.raises(SettingsError, match="environment variable MUSER_PREFILL_PORT: 'x' is not a whole number"):
        settings(MUSER_PREFILL_PORT="x").read()


def test_a_file_is_read_anew_each_time(write: Write, settings: Make) -> None:
    path = write("[network]\nport = 3\n")
    node = settings("--model", "m")
    assert node.read().namespace().port == 3
    path.write_text("[network]\nport = 5\n")
    assert node.read().namespace().port == 5
    assert dataclasses.replace(node, config="none").read().namespace().port == 4949
