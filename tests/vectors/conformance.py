"""Writes muser_wire/reference/golden.py: what the reference lane's conformance set gives with numpy and int64.

Run by `make vectors` after a change of the rules, which also bumps RULES_VERSION and adds to the history in
docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path

import muser_wire.reference
from muser_wire.reference.conformance import observe
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

OUT = Path(muser_wire.reference.__file__).with_name("golden.py")
HEAD = '''"""What the conformance set gives by the rules: written by tests/vectors/conformance.py, never by hand."""

GOLDEN: dict[str, str] = {
'''


def main() -> None:
    lines = [f'    "{name}": "{value}",\n' for name, value in observe(NumpyArithmetic(), thorough=True).items()]
    OUT.write_text(HEAD + "".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
