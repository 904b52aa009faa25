"""`muser-decode`: the decode node's command.

OpenBLAS must be in the process before mlx is imported, so the rest of the node is imported by
`main`, after that.
"""

from __future__ import annotations

import os
import sys

from muser_decode.blas import load_blas
from muser_decode.config import parser
from muser_wire.cli import service
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.settings.settings import Settings
from muser_wire.settings.show import show

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        if arguments.command == "service":
            return service.run(arguments)
        flags = arguments.keys.given(top, argv)
        settings = Settings(arguments.keys, flags, os.environ, muser_home(), arguments.config)
        if arguments.print_config:
            print(show(settings.read()), end="")
            return 0
        return run(settings)
    except WireError as error:
        print(f"muser-decode: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(settings: Settings) -> int:
    """Serve; return the exit status.

    Raises:
        WireError: the node cannot start; the message says why.
    """
    values = settings.read().namespace()
    if values.threads:
        # Read by OpenBLAS when it is loaded, which is next.
        os.environ["OPENBLAS_NUM_THREADS"] = str(values.threads)
    blas = load_blas()
    from muser_decode.errors import DecodeError
    from muser_decode.serve import serve

    try:
        serve(values, blas, settings)
    except DecodeError as error:
        print(f"muser-decode: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
