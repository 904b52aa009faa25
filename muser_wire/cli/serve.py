"""`muser serve`: both nodes in the foreground, their logs side by side, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from muser_wire.cli.ask import Endpoint
from muser_wire.cli.demo import add_pair_arguments, curl_example, explain, say
from muser_wire.cli.nodes import (
    POLL_S,
    Node,
    NodeFailed,
    Pair,
    PairOptions,
    describe_exit,
    running_pair,
    termination_as_interrupt,
)
from muser_wire.cli.progress import Meter
from muser_wire.cli.show import bold
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetch
from muser_wire.numerics import Lane

DEFAULT_PORT = 4949

READ_NBYTES = 65536
"""How much of a log is read at once; a pipe holds no more."""


class LogMux:
    """The output of several nodes on one terminal, each line with its node's name before it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._selector = selectors.DefaultSelector()
        self._begun: dict[str, bytes] = {}

    def add(self, name: str, pipe: int) -> None:
        """Watch one more pipe; `pump` prints its lines."""
        self._selector.register(pipe, selectors.EVENT_READ, name)
        self._begun[name] = b""

    def pump(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for output and print the lines that it completes; return whether any came."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return False
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._read(key.fd, key.data)
        return bool(ready)

    def drain(self) -> None:
        """Print what is left without waiting for more."""
        while self._selector.get_map() and self.pump(0.0):
            pass

    def _read(self, pipe: int, name: str) -> None:
        piece = os.read(pipe, READ_NBYTES)
        *lines, self._begun[name] = (self._begun[name] + piece).split(b"\n")
        if not piece:
            self._selector.unregister(pipe)
            lines += filter(None, [self._begun.pop(name)])
        for line in lines:
            self._write(f"{name:<7} | {line.decode(errors='replace')}")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser serve`."""
    parser = commands.add_parser("serve", help="run both nodes in the foreground until Ctrl-C")
    add_pair_arguments(parser)
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"HTTP port on loopback (default: {DEFAULT_PORT})"
    )
    parser.add_argument("--route", choices=["auto", "remote", "local"], default="auto", help="as of muser-decode serve")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, then stop both nodes; return the exit status, 0 when they stopped cleanly."""
    with tempfile.TemporaryDirectory(prefix="muser-serve-") as folder, termination_as_interrupt():
        try:
            model = fetch(arguments.model, muser_home(), Meter(sys.stderr))
            options = PairOptions(
                model,
                Path(folder),
                http_port=arguments.port,
                start_timeout_s=arguments.start_timeout,
                route=arguments.route,
                lane=Lane(arguments.lane),
            )
            return serve(options, LogMux(say))
        except WireError as error:
            explain(error)
            return 1
        except KeyboardInterrupt:  # before a node was started
            return 0


def serve(options: PairOptions, mux: LogMux) -> int:
    """Run both nodes until Ctrl-C; return the exit status.

    Raises:
        NodeFailed: a node was not ready in time, or the decode node ended.
    """
    with running_pair(options, piped=True) as pair:
        try:
            pair.start(lambda node: mux.add(node.name, output_of(node)), lambda: mux.pump(POLL_S))
            announce(pair)
            watch(pair, mux)
        except KeyboardInterrupt:
            say("", "Stopping both nodes.")
            codes = pair.stop()
            return 1 if any(codes) else 0
        finally:
            mux.drain()


def watch(pair: Pair, mux: LogMux) -> NoReturn:
    """Print logs until the decode node ends. Without the producer it goes on alone, which is said once.

    Raises:
        NodeFailed: the decode node ended.
    """
    alone = False
    while True:
        mux.pump(1.0)
        pair.decode.check_alive()
        code = pair.prefill.process.poll()
        if code is not None and not alone:
            alone = True
            say(f"The prefill node {describe_exit(code)}. The decode node goes on alone.")


def announce(pair: Pair) -> None:
    """Print where the endpoint is and how to try it."""
    url = Endpoint(pair.decode.ports["port"]).url
    say("", bold(f"Serving {url}/v1 until Ctrl-C. In another terminal:"), *curl_example(url), "")


def output_of(node: Node) -> int:
    """Return the pipe that carries a node's output.

    Raises:
        NodeFailed: it was started without one.
    """
    if node.process.stdout is None:
        raise NodeFailed(node.name, "has no pipe for its output", "")
    return node.process.stdout.fileno()
