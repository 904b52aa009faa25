"""What the commands of the two nodes have in common: their parser, the flags of a process, their exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from muser_wire.cli import service
from muser_wire.errors import WireError
from muser_wire.flags import new_file, seconds
from muser_wire.home import muser_home
from muser_wire.logs import FORMATS
from muser_wire.settings.keys import declare
from muser_wire.settings.settings import Settings
from muser_wire.settings.show import show

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def node_parser(
    node: str,
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    check: Callable[[argparse.Namespace], object],
) -> argparse.ArgumentParser:
    """Return the parser of a node's whole command. Parsed, `keys` are the keys of its configuration.

    Args:
        node: "prefill" or "decode".
        description: one line for `--help`.
        add_arguments: declares the flags of `serve`.
        check: refuses values that do not go together, before a service is installed.
    """
    top = argparse.ArgumentParser(prog=f"muser-{node}", description=description)
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve one model until SIGTERM")
    add_arguments(serve)
    keys = declare(serve, node)
    serve.set_defaults(keys=keys)
    service.add_parser(commands, keys, check)
    return top


def add_process(group: argparse._ArgumentGroup, running: str) -> None:
    """Declare the flags of every node's process; `running` is what a drain waits for."""
    group.add_argument(
        "--drain-s", type=seconds, default=30.0, help=f"seconds that SIGTERM leaves to running {running}"
    )
    group.add_argument("--ready-file", type=new_file, help="written as JSON once the node serves")
    group.add_argument("--trace", type=new_file, help="append where the time of handoffs goes, as JSON lines")
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    group.add_argument(
        "--log-format", choices=FORMATS, default="console", help="console: for people; json: an object a line"
    )


def run_node(
    top: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    serve: Callable[[Settings], None],
    errors: type[Exception],
) -> int:
    """Run a node's command; return its exit status.

    What is wrong with the configuration, and `errors` of the node itself, is one line on standard error.
    """
    arguments = top.parse_args(argv)
    try:
        if arguments.command == "service":
            return service.run(arguments)
        flags = arguments.keys.given(top, argv)
        settings = Settings(arguments.keys, flags, os.environ, muser_home(), arguments.config)
        if arguments.print_config:
            print(show(settings.read()), end="")
        else:
            serve(settings)
    except (WireError, errors) as error:
        print(f"{top.prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
