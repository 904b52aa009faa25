"""`muser-prefill`: the producer's command.

Torch takes seconds to import, so the node itself is imported by `run`, once there is something to serve.
"""

from __future__ import annotations

import os
import sys

from muser_prefill.config import parser
from muser_prefill.errors import PrefillError
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
        run(settings)
    except (WireError, PrefillError) as error:
        print(f"muser-prefill: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


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
