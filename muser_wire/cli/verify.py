"""`muser model verify`: both decoders, and a reference implementation where one is installed, over one fixed text."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from muser_wire.errors import VerificationError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.hf_folder import write_folder
from muser_wire.model.spec import ModelSpec
from muser_wire.model.tokenizer import load_tokenizer
from muser_wire.numerics import budget
from muser_wire.verification import Array, Evidence, VerifyJob

TEXT = (
    "The lighthouse keeper wrote down the weather each evening: wind from the north-west, 7 knots, clear to the "
    "horizon. In the log of 1893 somebody had drawn a gull beside the entry, and under it a sum, 48 x 52 = 2,496, with "
    "no word of what was counted. def rows(n): return [n * i for i in range(n)]  # the next keeper's hand\n"
    "Der Wind dreht; le phare reste allumé; 灯台の光は夜明けまで消えない。 "
)
"""Prose, numbers, code and other scripts."""

DEFAULT_TOKENS = 160
DEFAULT_GREEDY_TOKENS = 120
LOGITS_TOKENS = 32
"""After how many of the last prompt tokens logits are compared."""

CHUNK_TOKENS = 48
"""Divides neither the usual prompt nor a usual window."""

EXIT_MISSED = 1
PLAIN_ENCODINGS = {"F32", "F16", "BF16"}
STDERR_TAIL_CHARS = 1500


@dataclass(frozen=True)
class Contestant:
    """One implementation: the module that runs it, and the library that must be installed for it."""

    name: str
    module: str
    library: str

    @property
    def installed(self) -> bool:
        """Whether the library, and the node's package, are there. Nothing is imported."""
        package = self.module.partition(".")[0]
        return all(importlib.util.find_spec(name) is not None for name in (self.library, package))


DECODERS = (Contestant("torch", "muser_prefill.verify", "torch"), Contestant("mlx", "muser_decode.verify", "mlx"))
ORACLES = {
    "transformers": Contestant("transformers", "muser_prefill.oracle", "transformers"),
    "mlx-lm": Contestant("mlx-lm", "muser_decode.oracle", "mlx_lm"),
}


@dataclass(frozen=True)
class Difference:
    """How far two arrays are apart: the largest and the mean error.

    In units of the reference's size: its rms, or the value itself where that is larger. So "unit scale"
    in the table of budgets holds for any model.
    """

    largest: float
    mean: float

    @classmethod
    def between(cls, got: Array, reference: Array) -> Difference:
        """Return the difference over the last rows that both have; NaN where either has one."""
        rows = min(len(got), len(reference))
        if not rows or got.shape[1:] != reference.shape[1:]:
            return cls(float("nan"), float("nan"))
        theirs = reference[-rows:].astype(np.float64)
        size = np.maximum(np.abs(theirs), np.sqrt(np.mean(theirs**2)))
        error = np.abs(got[-rows:] - theirs) / np.maximum(size, np.finfo(np.float32).tiny)
        return cls(float(error.max()), float(error.mean()))


@dataclass(frozen=True)
class Comparison:
    """One contestant against another. `disputed` is the first greedy token on which they differ and neither was
    undecided, None where there is none; `greedy_equal` counts the leading tokens that are equal.
    """

    name: str
    logits: Difference
    planes: tuple[Difference, ...]
    greedy_equal: int
    disputed: int | None

    @classmethod
    def of(cls, name: str, got: Evidence, reference: Evidence, logits_budget: float) -> Comparison:
        """Compare what two contestants computed."""
        pairs = zip(got.planes, reference.planes, strict=True)
        pair = zip(got.greedy.tokens, reference.greedy.tokens, strict=True)
        equal = sum(1 for _ in itertools.takewhile(lambda tokens: tokens[0] == tokens[1], pair))
        ends = equal == len(got.greedy.tokens)
        # Each of the two leading logits may be off by the budget.
        undecided = 2 * logits_budget * float(np.sqrt(np.mean(np.square(reference.logits, dtype=np.float64))))
        disputed = None if ends or reference.greedy.leads[equal] <= undecided else equal
        planes = tuple(
            max((Difference.between(mine, theirs) for mine, theirs in zip(*both, strict=True)), key=_worse)
            for both in pairs
        )
        return cls(name, Difference.between(got.logits, reference.logits), planes, equal, disputed)

    def misses(self, budgets: dict[str, float]) -> list[str]:
        """Return what is beyond its budget, for people."""
        found = []
        if not self.logits.largest <= budgets["logits"]:
            found.append(f"{self.name}: logits are {self.logits.largest:.2g} apart, allowed are {budgets['logits']:g}")
        worst = max(range(len(self.planes)), key=lambda layer: _worse(self.planes[layer]))
        if not self.planes[worst].largest <= budgets["planes"]:
            apart = f"{self.planes[worst].largest:.2g} apart, allowed are {budgets['planes']:g}"
            found.append(f"{self.name}: planes of layer {worst} are {apart}")
        if self.disputed is not None:
            found.append(f"{self.name}: greedy token {self.disputed} differs, and it was no near tie")
        return found


def _worse(difference: Difference) -> float:
    """Order differences: NaN is worse than any number."""
    return float("inf") if np.isnan(difference.largest) else difference.largest


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `muser model verify`."""
    about = "run both decoders, and a reference implementation where one is installed, over a fixed text and compare"
    parser = actions.add_parser("verify", help=about, description=f"{about}. Exit status 1: a budget was missed.")
    parser.add_argument("name", metavar="PATH", help="GGUF file, folder, or the name of a fetched model")
    choices = ("auto", "none", *ORACLES)
    parser.add_argument("--oracle", choices=choices, default="auto", help="default: auto, whichever is installed")
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help="prompt length; the text is repeated to fill"
    )
    parser.add_argument("--greedy", type=int, default=DEFAULT_GREEDY_TOKENS, help="tokens to generate after it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return 1 when a budget was missed."""
    path = fetched_path(arguments.name, muser_home())
    checkpoint = open_checkpoint(path)
    oracle = _oracle(arguments.oracle)
    if oracle is not None:
        check_faithful(oracle, checkpoint.spec)
    contestants = [decoder for decoder in DECODERS if decoder.installed] + ([oracle] if oracle else [])
    if len(contestants) < 2:
        raise VerificationError("there is nothing to compare: of torch, mlx, transformers and mlx-lm one is installed")
    job = _job(path, arguments)
    with tempfile.TemporaryDirectory(prefix="muser-verify-") as folder:
        evidence = _collect(contestants, checkpoint, job, Path(folder))
    comparisons, misses = compare(evidence)
    print("\n".join(_report(checkpoint, job, comparisons)))
    print("\n".join(misses) or "within every budget", file=sys.stderr if misses else sys.stdout)
    return EXIT_MISSED if misses else 0


def _oracle(choice: str) -> Contestant | None:
    """Return the reference to use.

    Raises:
        VerificationError: the one that was asked for is not installed.
    """
    if choice in ORACLES:
        if not ORACLES[choice].installed:
            raise VerificationError(
                f"{choice} is not installed in this environment: {sys.executable} -m pip install {choice}"
            )
        return ORACLES[choice]
    found = next((oracle for oracle in ORACLES.values() if oracle.installed), None) if choice == "auto" else None
    if found is None:
        print("no reference implementation takes part: the decoders are compared with each other", file=sys.stderr)
    return found


def check_faithful(oracle: Contestant, spec: ModelSpec) -> None:
    """Check that a reference implementation computes this model, as far as its deviations are known.

    Raises:
        VerificationError: it does not.
    """
    if oracle.name != "mlx-lm":
        return
    scale = np.float32(spec.embedding_scale)
    # bf16 has the upper 16 bits of f32.
    if scale.view(np.uint32) & np.uint32(0xFFFF):
        raise VerificationError(
            f"mlx-lm rounds this model's embedding scale, {scale}, to bf16: compare with transformers"
        )


def _job(path: Path, arguments: argparse.Namespace) -> VerifyJob:
    """Return the job; the prompt is the text, repeated or cut, by the model's own tokenizer."""
    if arguments.tokens < 2 or arguments.greedy < 1:
        raise VerificationError("at least two prompt tokens and one greedy token are needed")
    tokenizer = load_tokenizer(path)
    text = tokenizer.encode(TEXT)
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    ids = [*start, *itertools.islice(itertools.cycle(text), arguments.tokens - len(start))]
    return VerifyJob(
        model=path.absolute(),
        token_ids=tuple(ids),
        logits_from=max(1, len(ids) - LOGITS_TOKENS),
        chunk_tokens=CHUNK_TOKENS,
        greedy_tokens=arguments.greedy,
    )


def _collect(
    contestants: list[Contestant], checkpoint: Checkpoint, job: VerifyJob, folder: Path
) -> dict[str, Evidence]:
    """Run one contestant after another, each in a process of its own; return what they computed, in this order."""
    evidence = {}
    for contestant in contestants:
        model = _readable(checkpoint, job.model, folder / "model") if contestant.name in ORACLES else job.model
        print(f"running {contestant.name}", file=sys.stderr)
        replace(job, model=model).write(folder / "job.json")
        out = folder / f"{contestant.name}.npz"
        command = [sys.executable, "-m", contestant.module, str(folder / "job.json"), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.is_file():
            raise VerificationError(f"{contestant.name} failed:\n{done.stderr[-STDERR_TAIL_CHARS:].strip()}")
        evidence[contestant.name] = Evidence.read(out)
    return evidence


def _readable(checkpoint: Checkpoint, path: Path, folder: Path) -> Path:
    """Return a folder that reference implementations read: the given one, or our f32 weights in their format."""
    encodings = {checkpoint.weight(name).encoding for name in checkpoint.names()}
    if path.is_dir() and encodings <= PLAIN_ENCODINGS:
        return path
    if not folder.exists():
        write_folder(checkpoint, folder)
    return folder


def compare(evidence: dict[str, Evidence]) -> tuple[list[Comparison], list[str]]:
    """Return every other contestant against the last one, the reference, and what missed its budget."""
    budgets = {"logits": budget("logits_f32"), "planes": budget("verify_planes")}
    *names, last = evidence
    comparisons = [
        Comparison.of(f"{name} / {last}", evidence[name], evidence[last], budgets["logits"]) for name in names
    ]
    return comparisons, [miss for comparison in comparisons for miss in comparison.misses(budgets)]


def _report(checkpoint: Checkpoint, job: VerifyJob, comparisons: list[Comparison]) -> list[str]:
    """Return the table, one column a comparison."""
    spec = checkpoint.spec
    rows = [
        ("", [comparison.name for comparison in comparisons]),
        ("largest, mean", ["largest    mean   "] * len(comparisons)),
        ("logits", [_cell(comparison.logits) for comparison in comparisons]),
        *((f"planes {i}", [_cell(c.planes[i]) for c in comparisons]) for i in range(len(spec.layers))),
        ("greedy equal", [f"{c.greedy_equal} of {job.greedy_tokens}" for c in comparisons]),
    ]
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(comparisons))]
    model = f"{spec.family}, {len(spec.layers)} layers, {checkpoint.encoding}"
    return [
        f"{model}: {len(job.token_ids)} tokens in f32; errors in units of what is compared",
        *(
            f"{label:<14}" + "".join("  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            for label, cells in rows
        ),
    ]


def _cell(difference: Difference) -> str:
    return f"{difference.largest:.2e} {difference.mean:.2e}"
