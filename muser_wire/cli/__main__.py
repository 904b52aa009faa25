"""The `muser` command: hands over to the module of the subcommand, and turns errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from muser_wire.cli import cache, chat, demo, doctor, exact, model, pair, plan, serve
from muser_wire.errors import WireError

EXIT_ERROR = 2
# What a shell reports for a command that Ctrl-C ended.
EXIT_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each module declares its own part."""
    top = argparse.ArgumentParser(prog="muser", description="What belongs to both nodes of Muser.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in (demo, serve, chat, pair, model, plan, cache, doctor, exact):
        module.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An error is a line on standard error, never a traceback."""
    arguments = parser().parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        # A reader that closed the pipe is noticed here, not in the interpreter's shutdown.
        sys.stdout.flush()
    except WireError as error:
        print(f"muser: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("muser: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `muser ... | head` is no error. Python flushes standard output once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
