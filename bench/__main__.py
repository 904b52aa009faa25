"""`python -m bench [NAME [FLAGS]]`: one benchmark, or every one in turn, each alone on the machine."""

from __future__ import annotations

import importlib
import sys

from bench.driver import BenchError

BENCHMARKS = ("prefill", "decode", "handoff", "wire", "overlap", "warm", "kvpack")


def main(argv: list[str]) -> int:
    """Run what was named, or all; return 1 when a goal was missed or a measurement could not be made."""
    names, flags = (argv[:1], argv[1:]) if argv else (list(BENCHMARKS), [])
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"bench: no benchmark is named {unknown[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        try:
            if importlib.import_module(f"bench.{name}").main(flags):
                failed.append(name)
        except BenchError as error:
            print(f"bench {name}: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        print(f"missed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
