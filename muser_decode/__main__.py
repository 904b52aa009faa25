"""`muser-decode`: the decode node's command.

OpenBLAS must be in the process before mlx is imported, so the rest of the node is imported by `run`, after that.
"""

from __future__ import annotations

import os
import sys

from muser_decode.blas import load_blas
from muser_decode.config import parser
from muser_decode.errors import DecodeError
from muser_wire.cli.node import run_node
from muser_wire.settings.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_node(parser(), argv, run, DecodeError)


def run(settings: Settings) -> None:
    """Serve; return after a signal.

    Raises:
        WireError: the node cannot start; the message says why.
        DecodeError: likewise.
    """
    values = settings.read().namespace()
    if values.threads:
        # Read by OpenBLAS when it is loaded, which is next.
        os.environ["OPENBLAS_NUM_THREADS"] = str(values.threads)
    blas = load_blas()
    from muser_decode.serve import serve

    serve(values, blas, settings)


if __name__ == "__main__":
    sys.exit(main())
