"""`--print-config`: every setting as a TOML file would have it, and where it came from behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from muser_wire.settings.document import VERSION, VERSION_KEY
from muser_wire.settings.settings import Read, Setting

HIDDEN = '"(hidden)"'


def show(read: Read) -> str:
    """Return a TOML document with every value and, as comments, where each came from. Secrets are left out.

    Read as a configuration file it gives the same settings.
    """
    sections = dict.fromkeys(setting.key.section for setting in read.settings)
    lines = [f"# file read: {read.file or 'none'}", f"{VERSION_KEY} = {VERSION}"]
    for section in sorted(sections, key=bool):
        lines += ["", f"[{section}]"] if section else []
        lines += _aligned([_line(setting) for setting in read.settings if setting.key.section == section])
    return "\n".join(lines) + "\n"


def _aligned(lines: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(text) for text, _ in lines)
    return (f"{text:<{width}}  # {source}" for text, source in lines)


def _line(setting: Setting) -> tuple[str, str]:
    name, value = setting.key.name, setting.value
    if value is None:
        return f"# {name} is not set", setting.source
    if setting.key.is_secret:
        return f"# {name} = {HIDDEN}", setting.source
    # A flag's path begins where it was typed; in the file it would begin in the file's folder.
    return f"{name} = {toml_value(value.absolute() if isinstance(value, Path) else value)}", setting.source


def toml_value(value: object) -> str:
    """Return a value as TOML writes it.

    >>> toml_value([True, 4949, "a b"])
    '[true, 4949, "a b"]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # A JSON string is a TOML one, once DEL is written as an escape too.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
