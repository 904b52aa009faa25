"""The peer's side of a benchmark: requests and answers as JSON lines.

Standard library only: it runs in any environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests from standard input until it ends.

    A request `{"op": "name", ...}` calls `handlers[name]` with the other fields; its result is the answer. What
    libraries print goes to standard error, so that it cannot stand between answers. A handler that raises ends the
    process with a traceback there.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = handlers[request.pop("op")](**request)
        print(json.dumps(answer), file=answers, flush=True)
