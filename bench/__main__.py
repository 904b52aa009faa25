"""`python -m bench [NAME [FLAGS]]`: one benchmark, or every one in turn, each alone on the machine."""

from __future__ import annotations

import importlib
import sys

from bench.driver import BenchError

BENCHMARKS = (
    *("prefill", "decode", "batch", "http", "reference", "handoff"),
    *("wire", "overlap", "warm", "kvpack", "accuracy"),
)
MORE_RUNS = {"prefill": [["--model", "gemma3-270m"]], "decode": [["--count", "muse-glimmer"]]}
"""With which flags a benchmark runs a second time where all are run."""


def main(argv: list[str]) -> int:
    """Run what was named, or all; return 1 when a goal was missed or a measurement could not be made."""
    if argv and argv[0] not in BENCHMARKS:
        print(f"bench: no benchmark is named {argv[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = []
    for name, flags in [(argv[0], argv[1:])] if argv else every_run():
        title = " ".join([name, *flags])
        print(f"== {title}", flush=True)
        try:
            if importlib.import_module(f"bench.{name}").main(flags):
                failed.append(title)
        except BenchError as error:
            print(f"bench {title}: {error}", file=sys.stderr)
            failed.append(title)
    if failed:
        print(f"missed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def every_run() -> list[tuple[str, list[str]]]:
    """Return each benchmark with the flags of each of its runs."""
    return [(name, flags) for name in BENCHMARKS for flags in ([], *MORE_RUNS.get(name, []))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
