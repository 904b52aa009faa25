"""`muser-prefill`: the producer's command.

Torch takes seconds to import, so the node itself is imported by `run`, once there is something to serve.
"""

from __future__ import annotations

import sys

from muser_prefill.config import parser
from muser_prefill.errors import PrefillError
from muser_wire.cli.node import run_node
from muser_wire.settings.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_node(parser(), argv, run, PrefillError)


def run(settings: Settings) -> None:
    """Serve; return after a signal.

    Raises:
        WireError: the node cannot start; the message says why.
        PrefillError: likewise.
    """
    # What cannot be configured is refused before the seconds that torch takes.
    settings.read().namespace()
    from muser_prefill.serve import serve

    serve(settings)


if __name__ == "__main__":
    sys.exit(main())
