from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muser_wire.settings.document import read_document
from muser_wire.settings.errors import SettingsError
from muser_wire.settings.keys import Keys

Write = Callable[[str], Path]

EVERY_SPELLING = """\
# A comment = "x"
config_version = 1
loose = '''
[network]
port = 1
'''

model = { model = "m.gguf",
  dtype = "f32" }

[network]
"host" = "::1"   # [process]
peer = [
  "a:1",  # the first

  "b:2",
]
open=true

[process]
drain_s = 5
"""


def test_values_and_lines_in_every_spelling_that_toml_has(keys: Keys, write: Write, tmp_path: Path) -> None:
    text = EVERY_SPELLING.replace('{ model = "m.gguf",\n  dtype = "f32" }', '{ model = "m.gguf", dtype = "f32" }\n')
    document = read_document(write(text), keys)
    assert document.values == {
        "loose": "[network]\nport = 1\n",
        "model": tmp_path / "m.gguf",
        "dtype": "f32",
        "host": "::1",
        "peer": ["a:1", "b:2"],
        "open": True,
        "drain_s": 5.0,
    }
    # Counted by hand.
    assert document.lines == {
        "loose": 3, "model": 8, "dtype": 8, "host": 12, "peer": 13, "open": 18, "drain_s": 21,
    }  # fmt: skip


def test_dotted_keys_and_other_line_ends_are_found_too(keys: Keys, write: Write) -> None:
    document = read_document(write('network.port = 1\r\nnetwork.host = "a"\r\n\r\nprocess.drain_s = 2\r\n'), keys)
    assert document.lines == {"port": 1, "host": 2, "drain_s": 4}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n[network]\nprot = 1\n", ":3: unknown key network.prot: perhaps network.port is meant"),
        ("\n\nmax-rate = 1\n", ":3: unknown key max-rate: perhaps network.max_rate is meant"),
        ("[netwrok]\nport = 1\n", ":1: unknown key netwrok: perhaps network is meant"),
        ("port = 1\n", ":1: port is not read here: port stands in the table [network]"),
        ("[network]\nloose = 'x'\n", ":2: network.loose is not read here: loose stands in no table, above them all"),
        ("[network]\ndrain_s = 1\n", ":2: network.drain_s is not read here: drain_s stands in the table [process]"),
        ("xyzzy = 1\n", ":1: unknown key xyzzy"),
        ("[network.port]\na = 1\n", ":1: port is a table; it takes one value"),
        ("network = 5\n", ":1: network is a table of keys, and here it is none"),
        ("[[network]]\nport = 1\n", ":1: network is a table of keys, and here it is none"),
        ("[network]\n\nport = '1'\n", ":3: port is a string; it takes a number: write 1 without quotes"),
        ("[process]\ndrain_s = '5min'\n", ":2: drain_s is wrong: '5min' is not a number of seconds"),
        ("[process]\ndrain_s = 1979-05-27\n", ":2: drain_s is a date or time; it takes one value"),
        ("\nconfig_version = 2\n", ":2: config_version is 2, and this Muser reads up to 1"),
        ("config_version = 99\nsomething_new = 1\n", "the file is for a newer Muser"),
        ("config_version = '1'\n", ":1: config_version is '1'; it takes a whole number from 1 to 1"),
        ("config_version = 0\n", ":1: config_version is 0"),
        ("config_version = true\n", ":1: config_version is True"),
        ("[network]\nport = 1\nport = 2\n", "is not TOML: Cannot overwrite a value (at line 3"),
        ("[network\n", "is not TOML"),
        ("#\n" * 1001, "has more than 1000 lines"),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_and_line(keys: Keys, write: Write, text: str, problem: str) -> None:
    path = write(text)
    with pytest.raises(SettingsError) as refused:
        read_document(path, keys)
    assert str(refused.value).startswith(str(path))
    assert problem in str(refused.value)


def test_a_file_that_is_no_text_or_not_readable_is_named(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "prefill.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(SettingsError, match=r"prefill\.toml is not UTF-8 at byte 5"):
        read_document(tmp_path / "prefill.toml", keys)
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        read_document(tmp_path, keys)
