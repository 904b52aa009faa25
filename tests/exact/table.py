"""`make exact`: the same bytes from every library, in whatever chunks, over a real handoff, and after a broken one.

Each run of each model is compared with the digests in tests/vectors/exact.json, which every machine must give. One
table; a difference anywhere is an exit status of 1. `--write` makes that file anew, after a change of the rules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from exact_nodes import broken_handoff, handoff
from exact_runs import (
    CPU,
    TOKENS,
    Digests,
    Fixture,
    decode_run,
    mlx_run,
    one_by_one,
    plain_run,
    random_chunks,
    text_fixture,
    tiny_muse,
    torch_run,
    whole,
)

from muser_prefill.kernels.exact.reference import plain_kernels
from muser_wire.home import muser_home
from muser_wire.model.fetch import fetched_path
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

VECTORS = Path(__file__).resolve().parent.parent / "vectors" / "exact.json"
MODELS = ("tiny-muse", "smollm2", "gemma3-270m")
SHORTEST, SHORT, MIDDLE = 12, 64, 512
INTERPRETED_LAYERS = 2
Run = tuple[str, str, int, Callable[[], Digests]]


def fixtures(names: list[str], folder: Path) -> Iterator[Fixture]:
    for name in names:
        yield tiny_muse(folder) if name == "tiny-muse" else text_fixture(name, fetched_path(name, muser_home()))


def runs(fixture: Fixture) -> Iterator[Run]:
    """Yield library, way, tokens and what runs it. MLX on a CPU reads long prompts slowly, so it has fewer.

    "decode" is the decode node with compiled kernels.
    """
    weights, ids = fixture.weights(), fixture.ids
    numpy = NumpyArithmetic(np.float64)
    yield "numpy", "one by one", SHORT, lambda: plain_run(numpy, weights, one_by_one(ids[:SHORT]))
    yield "numpy", "whole", MIDDLE, lambda: plain_run(numpy, weights, whole(ids[:MIDDLE]))
    yield "torch, plain", "chunks", SHORT, lambda: torch_run(weights, random_chunks(ids[:SHORT]), plain_kernels(CPU))
    yield "torch", "one by one", SHORT, lambda: torch_run(weights, one_by_one(ids[:SHORT]))
    yield "torch", "whole", MIDDLE, lambda: torch_run(weights, whole(ids[:MIDDLE]))
    yield "torch", "whole", TOKENS, lambda: torch_run(weights, whole(ids))
    yield "torch", "chunks", TOKENS, lambda: torch_run(weights, random_chunks(ids))
    yield "triton", "2 layers", SHORTEST, lambda: interpreted(fixture)
    yield "mlx", "one by one", SHORT, lambda: mlx_run(weights, one_by_one(ids[:SHORT]))
    yield "mlx", "chunks", MIDDLE, lambda: mlx_run(weights, random_chunks(ids[:MIDDLE]))
    yield "mlx", "whole", TOKENS, lambda: mlx_run(weights, whole(ids))
    yield "decode", "one by one", TOKENS, lambda: decode_run(weights, one_by_one(ids))
    yield "decode", "chunks", TOKENS, lambda: decode_run(weights, random_chunks(ids))
    segments = 0

    def remote() -> Digests:
        nonlocal segments
        found = handoff(fixture)
        segments = found.report.segments_verified
        return found.digests

    yield "both nodes", "handoff", TOKENS, remote
    yield "both nodes", "broken", TOKENS, lambda: broken_handoff(fixture, segments).digests
    yield "both, compiled", "handoff", TOKENS, lambda: handoff(fixture, compiled=True).digests
    yield "both, compiled", "broken", TOKENS, lambda: broken_handoff(fixture, segments, compiled=True).digests


def interpreted(fixture: Fixture) -> Digests:
    """Run Triton's kernels over the first layers in its interpreter, which a process chooses before it imports triton.

    It is slow: a few tokens, and no logits.
    """
    job = json.dumps(
        {"path": str(fixture.path), "chunks": [fixture.ids[:7], fixture.ids[7:SHORTEST]], "layers": INTERPRETED_LAYERS}
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("interpreted.py"))]
    done = subprocess.run(command, input=job, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return Digests(tuple(found["planes"]), "")


def expected(fixture: Fixture) -> dict[str, Any]:
    """Return what vectors hold of a model: numpy gives the shorter prompts, the shortest with 64-bit integers; the
    producer's decoder gives the whole one.
    """
    weights, ids = fixture.weights(), fixture.ids
    prompts = {
        SHORTEST: plain_run(NumpyArithmetic(np.int64), weights, whole(ids[:SHORTEST])),
        SHORT: plain_run(NumpyArithmetic(np.int64), weights, whole(ids[:SHORT])),
        MIDDLE: plain_run(NumpyArithmetic(np.float64), weights, whole(ids[:MIDDLE])),
        TOKENS: torch_run(weights, whole(ids)),
    }
    plain = {str(count): digests.plain() for count, digests in prompts.items()}
    return {"weights": weights.digest().hex(), "prompts": plain}


def verdict(found: Digests, wanted: dict[str, Any]) -> str:
    """Return "equal", or which planes and logits differ. A run may have stopped after some layers, without logits."""
    pairs = zip(found.planes, wanted["planes"], strict=False)
    layers = [str(layer) for layer, (mine, theirs) in enumerate(pairs) if mine != theirs]
    parts = [f"planes of layers {', '.join(layers)}"] if layers else []
    parts += [] if found.logits in {wanted["logits"], ""} else ["logits"]
    return f"DIFFERS: {', '.join(parts)}" if parts else "equal"


def check(fixture: Fixture, wanted: dict[str, Any], only: str) -> bool:
    """Run a model every way whose row begins with `only`, print the rows; return whether all were equal."""
    good = fixture.weights().digest().hex() == wanted["weights"]
    print(f"{fixture.name:<12} {'weights':<14} {'digest':<11} {'':>6}  {'equal' if good else 'DIFFERS'}", flush=True)
    for library, way, tokens, run in runs(fixture):
        if not library.startswith(only):
            continue
        started = time.process_time()
        found = run()
        said = verdict(found, wanted["prompts"][str(tokens)])
        good &= said == "equal"
        seconds = time.process_time() - started
        row = f"{fixture.name:<12} {library:<14} {way:<11} {tokens:>6}  {said:<8} {found.logits} {seconds:8.1f} CPU s"
        print(row, flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="exact", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all three")
    parser.add_argument("--only", default="", metavar="LIBRARY", help="such as torch, mlx, both; default: every one")
    parser.add_argument("--write", action="store_true", help="write the vectors of these models anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    vectors = json.loads(VECTORS.read_text()) if VECTORS.exists() else {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for fixture in fixtures(options.model or list(MODELS), Path(folder)):
            if options.write:
                vectors[fixture.name] = expected(fixture)
                VECTORS.write_text(json.dumps(vectors, indent=1) + "\n")
            else:
                good &= check(fixture, vectors[fixture.name], options.only)
    print("every byte is equal" if good else "NOT EQUAL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
