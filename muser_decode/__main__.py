"""`muser-decode`: the decode node's command.

OpenBLAS must be in the process before mlx is imported, so the rest of the node is imported by
`main`, after that.
"""

from __future__ import annotations

import argparse
import os
import sys

from muser_decode.blas import load_blas
from muser_decode.config import add_arguments

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="muser-decode", description="Muser's decode node: an OpenAI-compatible chat")
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("serve", help="serve one model until SIGTERM"))
    arguments = parser.parse_args(argv)
    if arguments.threads:
        # Read by OpenBLAS when it is loaded, which is next.
        os.environ["OPENBLAS_NUM_THREADS"] = str(arguments.threads)
    blas = load_blas()
    from muser_decode.errors import DecodeError
    from muser_decode.serve import serve
    from muser_wire.errors import WireError

    try:
        serve(arguments, blas)
    except (WireError, DecodeError) as error:
        print(f"muser-decode: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
