from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.settings.errors import SettingsError
from muser_wire.settings.keys import Key, Keys
from muser_wire.settings.values import default_of, from_text, from_toml


def key(keys: Keys, name: str) -> Key:
    return next(key for key in keys.keys if key.name == name)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("port", 80, 80),
        ("drain_s", 2, 2.0),
        ("drain_s", 2.5, 2.5),
        ("max_rate", "1.5G", 1.5e9),
        ("max_rate", 1500, 1500.0),
        ("open", True, True),
        ("peer", ["a:1", "b"], ["a:1", "b"]),
        ("peer", "a:1", ["a:1"]),
        ("peer", [], []),
        ("host", "::1", "::1"),
        ("dtype", "f32", "f32"),
        ("model", "/models/m", Path("/models/m")),
        ("model", "m/n", Path("/etc/muser/m/n")),
        ("model", "~/m", Path.home() / "m"),
    ],
)
def test_a_toml_value_is_what_the_flag_would_have_given(keys: Keys, name: str, value: object, read: object) -> None:
    assert from_toml(key(keys, name), value, Path("/etc/muser")) == read


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("port", "80", "is a string; it takes a number: write 80 without quotes"),
        ("port", 80.0, "not a whole number from 0 to 65535"),
        ("port", 70000, "'70000' is not a whole number from 0 to 65535"),
        ("port", True, "is a boolean; it takes one value"),
        ("port", [80], "is an array; it takes one value"),
        ("drain_s", "30 s", "'30 s' is not a number of seconds"),
        ("drain_s", "30", "is a string; it takes a number: write 30 without quotes"),
        ("max_rate", "10Gbit", "'10Gbit' is no rate"),
        ("open", "true", "is a string; it takes true or false"),
        ("open", 1, "is an integer; it takes true or false"),
        ("host", 5, "is an integer; it takes a string"),
        ("model", 5, "is an integer; it takes a string"),
        ("peer", [1], "is an integer; it takes a string"),
        ("peer", [["a"]], "is an array; it takes a string"),
        ("dtype", "f64", "'f64' is none of f32, bf16"),
        ("host", {"a": 1}, "is a table; it takes a string"),
        ("model", "~nobody-of-that-name/m", "'~nobody-of-that-name/m' is in a home that is not known here"),
    ],
)
def test_a_wrong_type_or_unit_is_refused(keys: Keys, name: str, value: object, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        from_toml(key(keys, name), value, Path("/etc/muser"))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("port", "80", 80),
        ("open", "true", True),
        ("open", "false", False),
        ("peer", "a:1, b,", ["a:1", "b"]),
        ("peer", "", []),
        ("host", "", ""),
        ("model", "m", Path("m")),
    ],
)
def test_a_variable_is_read_as_a_flag_with_commas_between_several(
    keys: Keys, name: str, text: str, read: object
) -> None:
    assert from_text(key(keys, name), text) == read


@pytest.mark.parametrize(("name", "text"), [("port", ""), ("port", "x"), ("open", "yes"), ("open", ""), ("dtype", "x")])
def test_a_variable_that_cannot_be_read_is_refused(keys: Keys, name: str, text: str) -> None:
    with pytest.raises(SettingsError):
        from_text(key(keys, name), text)


def test_defaults_are_those_of_the_flags(keys: Keys) -> None:
    assert default_of(key(keys, "port")) == 4949
    assert default_of(key(keys, "peer")) == []
    assert default_of(key(keys, "model")) is None
