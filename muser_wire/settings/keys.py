"""The keys of a node's configuration: the flags of its `serve` command, read from the parser that declares them.

A flag `--max-rate` in the argument group `network` is the key `max_rate` in the table `[network]` of the file, and
the variable `MUSER_PREFILL_MAX_RATE`. A flag that may be given several times takes an array in the file, and values
with commas between them in the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muser_wire.flags import new_file

CONFIG, PRINT_CONFIG = "config", "print_config"
NO_FILE = "none"
"""What `--config` takes to read no file at all."""

_NOT_KEYS = {"help", CONFIG, PRINT_CONFIG}
_SECRET = re.compile(r"(^|_)(key|token|secret|password)$")


@dataclass(frozen=True)
class Key:
    """One key. `section` is its table in the file, empty for none; `flag` is how it is given by hand."""

    name: str
    section: str
    flag: str
    action: argparse.Action
    required: bool

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: it is true or false."""
        return self.action.nargs == 0

    @property
    def is_list(self) -> bool:
        """Whether it holds several values: the flag may be given several times, or takes several values at once."""
        repeats = isinstance(self.action, argparse._AppendAction)  # noqa: SLF001 - argparse has no public name for it
        return repeats or self.action.nargs in ("*", "+")

    @property
    def is_path(self) -> bool:
        """Whether its values are paths: in a file they are taken from the file's folder."""
        return self.action.type in (Path, new_file)

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown. The path of a file that holds a secret is none."""
        return not self.is_path and _SECRET.search(self.name) is not None


@dataclass(frozen=True)
class Keys:
    """The keys of one node: "prefill" or "decode". `parser` is the one of its `serve` command."""

    node: str
    parser: argparse.ArgumentParser
    keys: tuple[Key, ...]

    @property
    def prefix(self) -> str:
        """What the environment variables of this node begin with."""
        return f"MUSER_{self.node.upper()}_"

    def variable(self, name: str) -> str:
        """Return the environment variable of a key."""
        return self.prefix + name.upper()

    def given(self, top: argparse.ArgumentParser, argv: Sequence[str] | None) -> dict[str, object]:
        """Return the keys that a command line gives itself, by name. `top` is the parser of the whole command.

        The command line must have been parsed once before, so that it is known to be right.
        """
        with self._without_defaults():
            parsed = vars(top.parse_args(argv))
        return {key.name: parsed[key.name] for key in self.keys if key.name in parsed}

    @contextlib.contextmanager
    def _without_defaults(self) -> Iterator[None]:
        before = [key.action.default for key in self.keys]
        for key in self.keys:
            key.action.default = argparse.SUPPRESS
        try:
            yield
        finally:
            for key, default in zip(self.keys, before, strict=True):
                key.action.default = default


def declare(parser: argparse.ArgumentParser, node: str) -> Keys:
    """Return the keys that the flags of `parser` are, and give it the flags for the file.

    A flag that is required is from now on the business of `Settings`: file and environment may give it too.
    """
    keys = tuple(_keys_of(parser))
    for key in keys:
        key.action.required = False
    example = f"MUSER_{node.upper()}_MAX_X"
    group = parser.add_argument_group(
        "configuration",
        f"Each flag above is a key of the file too: --max-x is max_x in the table that heads it here; and a variable, "
        f"{example}. A flag comes before its variable, that before the file.",
    )
    group.add_argument(
        "--config", metavar="PATH", help=f"TOML file; none: no file (default: {node}.toml in MUSER_HOME, where it is)"
    )
    group.add_argument("--print-config", action="store_true", help="show each value and where it comes from, and end")
    return Keys(node, parser, keys)


def _keys_of(parser: argparse.ArgumentParser) -> Iterator[Key]:
    # argparse has no public way to its own declarations; these names have been there since it exists.
    for group in parser._action_groups:  # noqa: SLF001
        section = "" if group is parser._optionals else str(group.title)  # noqa: SLF001
        for action in group._group_actions:  # noqa: SLF001
            if action.option_strings and action.dest not in _NOT_KEYS:
                # The first long one: of a switch the other says no.
                flag = next((one for one in action.option_strings if one.startswith("--")), action.option_strings[0])
                yield Key(action.dest, section, flag, action, action.required)
