"""The product's contestant for HTTP: a whole node, and its decoder without the node, in one process.

Two processes with the same weights differ by more than HTTP costs, so the engine's own time is taken where the node's
is: with the node's own weights, while the node idles. Runs in the product's environment.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ours_decode
from lines import Handler, serve

import muser_decode.serve as node
from muser_decode.__main__ import main
from muser_decode.lanes import load_decoder

LOOK_S = 0.05


class Contestant(ours_decode.Contestant):
    """Holds the decoder of the node that runs on the main thread; requests are answered on another."""

    def __init__(self) -> None:
        self._arguments: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def start(self, arguments: list[str], ready: str) -> dict[str, Any]:
        """Start the node with these arguments of its command; return once its file `ready` is there."""
        self._arguments.put(arguments)
        while not Path(ready).exists():
            time.sleep(LOOK_S)
        return {}

    def run(self) -> int:
        """Serve as the command does, once told to start; return its exit status."""
        node.load_decoder = self._kept
        return main(self._arguments.get())

    def _kept(self, *arguments: Any) -> Any:
        self.decoder = load_decoder(*arguments)
        return self.decoder


def answer(handlers: Mapping[str, Handler]) -> None:
    """Answer requests; a handler that raises ends the whole process, for the other side waits for that."""
    try:
        serve(handlers)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    contestant = Contestant()
    handlers = {"start": contestant.start, "decode": contestant.decode}
    threading.Thread(target=answer, args=(handlers,), daemon=True).start()
    sys.exit(contestant.run())
