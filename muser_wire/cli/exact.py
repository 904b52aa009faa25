"""`muser exact`: does each device of this machine compute as the reference lane's rules say?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from muser_wire.errors import VerificationError
from muser_wire.numerics import Lane, rules_digest
from muser_wire.reference.conformance import Observed, conformance_digest, differing, golden_digest, observe
from muser_wire.reference.constants import RULES_VERSION
from muser_wire.reference.golden import GOLDEN
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

EXIT_DIFFERS = 1
STDERR_TAIL_CHARS = 1500
SHOWN_DIGITS = 16


@dataclass(frozen=True)
class Observer:
    """A process that runs the conformance set with one library, and that library."""

    module: str
    library: str

    @property
    def installed(self) -> bool:
        """Whether the library, and the node's package, are there. Nothing is imported."""
        package = self.module.partition(".")[0]
        return all(importlib.util.find_spec(name) is not None for name in (self.library, package))


OBSERVERS = {
    "torch": Observer("muser_prefill.reference.conform", "torch"),
    "mlx": Observer("muser_decode.reference.conform", "mlx"),
}


@dataclass(frozen=True)
class Report:
    """What one device gave."""

    device: str
    observed: Observed


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser exact` and its subcommands."""
    parser = commands.add_parser("exact", help="check that this machine's devices follow the reference lane's rules")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    conformance = actions.add_parser(
        "conformance", help="golden hashes of single steps, stages and tiny models on every library that is installed"
    )
    conformance.add_argument("--thorough", action="store_true", help="every reciprocal and root, and more of 2 ** x")
    conformance.add_argument("--device", help="torch's device, such as cuda (default: cpu); MLX has its own default")
    conformance.add_argument("--json", action="store_true", help="print one JSON object")
    conformance.set_defaults(run=run_conformance)


def run_conformance(arguments: argparse.Namespace) -> int:
    """Print which checks each library passes; return 1 when one fails."""
    reports = {"numpy": Report("numpy", observe(NumpyArithmetic(np.int64), thorough=arguments.thorough))}
    for name, observer in OBSERVERS.items():
        if observer.installed:
            device = ["--device", arguments.device] if arguments.device and name == "torch" else []
            reports[name] = _observed(name, observer, device, thorough=arguments.thorough)
    if arguments.json:
        print(json.dumps(_plain(reports), indent=2))
    else:
        print("\n".join(_lines(reports)))
    return EXIT_DIFFERS if any(differing(report.observed) for report in reports.values()) else 0


def _observed(name: str, observer: Observer, device: list[str], *, thorough: bool) -> Report:
    """Run one library's process.

    Raises:
        VerificationError: it failed; the message ends with its last words.
    """
    command = [sys.executable, "-m", observer.module, *device, *(["--thorough"] if thorough else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VerificationError(f"{name} could not be observed:\n{done.stderr[-STDERR_TAIL_CHARS:]}")
    found = json.loads(done.stdout)
    return Report(str(found["device"]), dict(found["observed"]))


def _plain(reports: dict[str, Report]) -> dict[str, object]:
    return {
        "rules_version": RULES_VERSION,
        "rules_digest": rules_digest(Lane.REFERENCE).hex(),
        "golden_digest": golden_digest().hex(),
        "libraries": {
            name: {
                "device": report.device,
                "conformance_digest": conformance_digest(report.observed).hex(),
                "differing": differing(report.observed),
                "observed": report.observed,
            }
            for name, report in reports.items()
        },
    }


def _lines(reports: dict[str, Report]) -> list[str]:
    names = [name for name in GOLDEN if any(name in report.observed for report in reports.values())]
    width = max(map(len, names))
    lines = [f"{'':<{width}}  {'  '.join(f'{name:>9}' for name in reports)}"]
    for name in names:
        cells = (f"{_verdict(name, report.observed):>9}" for report in reports.values())
        lines.append(f"{name:<{width}}  {'  '.join(cells)}")
    lines += [f"{name}: {report.device}" for name, report in reports.items() if report.device != name]
    lines.append(f"rules, version {RULES_VERSION}: {rules_digest(Lane.REFERENCE).hex()[:SHOWN_DIGITS]}")
    lines.append(f"conformance: {golden_digest().hex()[:SHOWN_DIGITS]} is what the rules give")
    return lines


def _verdict(name: str, observed: Observed) -> str:
    if name not in observed:
        return "-"
    return "equal" if observed[name] == GOLDEN[name] else "DIFFERS"
