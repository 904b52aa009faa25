"""How far the reference lane is from float32 with the same weights, and from llama.cpp over the same file.

`python -m bench accuracy --help` lists the options. Every token of four pinned texts counts; both distances are taken
over whole distributions. llama.cpp is only reported: it rounds activations to 8 bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.driver import PEERS_VENV, BenchError, Goal, Peer, judge, machine, peer_python, table, write_result
from bench.prefill import LLAMACPP_REQUIREMENTS
from muser_prefill.head import DecoderWithHead
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.errors import WireError
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.model.tokenizer import Tokenizer, load_tokenizer
from muser_wire.numerics import budget
from muser_wire.reference.canonical import CanonicalWeights

CPU = torch.device("cpu")
MODELS = ("smollm2", "gemma3-270m")
TEXTS = Path(__file__).resolve().parent / "texts"
TOKENS = 512
"""Of each text, the token that a model begins every text with included."""
ROWS = 32
F32 = "f32, same weights"
LLAMA = "llama.cpp, same file"

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Distance:
    """Of the reference lane from something else, over all tokens of a text: mean divergence in nats, the share of
    tokens whose best next token is another, and the largest difference of two logits.
    """

    kl: float
    top1_differs: float
    logit: float

    @classmethod
    def between(cls, reference: Logits, other: Logits) -> Distance:
        """Return how far the lane's logits are from others', `[T, vocab]` each."""
        kl, differs = 0.0, 0
        # A large vocabulary's logits in float64 would be gigabytes.
        for start in range(0, len(reference), ROWS):
            ours, theirs = (_log_probabilities(x[start : start + ROWS]) for x in (reference, other))
            kl += float((np.exp(theirs) * (theirs - ours)).sum())
            differs += int((theirs.argmax(-1) != ours.argmax(-1)).sum())
        count = len(reference)
        return cls(kl / count, differs / count, float(np.abs(reference - other).max()))

    @classmethod
    def mean(cls, distances: Sequence[Distance]) -> Distance:
        """Return the means over texts, and the largest difference of all."""
        count = len(distances)
        kl, differs = sum(d.kl for d in distances) / count, sum(d.top1_differs for d in distances) / count
        return cls(kl, differs, max(d.logit for d in distances))


def _log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(prog="bench.accuracy", description=__doc__)
    parser.add_argument("--model", action="append", help=f"name or path; default: {', '.join(MODELS)}")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and llama.cpp")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--venv", type=Path, default=PEERS_VENV, help="environment of llama.cpp, made when missing")
    parser.add_argument("--out", type=Path, help="write the distances here, as JSON")
    options = parser.parse_args(argv)
    host = machine()
    torch.set_num_threads(options.threads)
    try:
        python = None if options.no_llama else peer_python(options.venv, LLAMACPP_REQUIREMENTS)
        found = {name: measure(name, options.threads, python) for name in options.model or MODELS}
    except (BenchError, WireError) as error:
        print(f"bench.accuracy: {error}", file=sys.stderr)
        return 1
    report(found)
    if options.out is not None:
        plain = {model: {name: vars(d) for name, d in rows.items()} for model, rows in found.items()}
        write_result(options.out, host, unit="nats, shares, logits", tokens=TOKENS, distances=plain)
    return judge(goals(found))


def measure(name: str, threads: int, python: Path | None) -> dict[str, Distance]:
    """Return a model's distances by text and what they are from; the mean over the texts is under that name alone."""
    path = fetched_path(name, muser_home())
    checkpoint, prompts = open_checkpoint(path), texts(load_tokenizer(path))
    reference = TorchReferenceDecoder(CanonicalWeights(checkpoint), device=CPU, whole=True)
    found: dict[str, Distance] = {}
    with ExitStack() as stack:
        others = {F32: DecoderWithHead(checkpoint, dtype=torch.float32, kv_element=None, device=CPU).logits}
        if python is not None:
            others[LLAMA] = llama(path, threads, python, stack)
        for text, ids in prompts.items():
            ours = reference.logits(ids, reference.new_cache(len(ids))).numpy()
            found |= {f"{name}, {text}": Distance.between(ours, run(ids).numpy()) for name, run in others.items()}
    for other in others:
        found[other] = Distance.mean([found[f"{other}, {text}"] for text in prompts])
    return found


def texts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Return the pinned texts by name, as ids."""
    bos = [] if tokenizer.bos_id is None or not tokenizer.adds_bos else [tokenizer.bos_id]
    found = {}
    for path in sorted(TEXTS.glob("*.txt")):
        ids = [*bos, *tokenizer.encode(path.read_text(encoding="utf-8"))][:TOKENS]
        if len(ids) < TOKENS:
            raise BenchError(f"{path.name} has {len(ids)} tokens in this vocabulary, {TOKENS} are needed")
        found[path.stem] = ids
    return found


def llama(path: Path, threads: int, python: Path, stack: ExitStack) -> Callable[[Sequence[int]], torch.Tensor]:
    """Start llama.cpp; return what gives its logits after each token, `[T, vocab]`."""
    out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "logits.npy"
    peer = Peer("llama.cpp", "llamacpp_logits.py", python, threads)
    stack.callback(peer.close)
    peer.call("load", model=str(path.absolute()), context=TOKENS, threads=threads)

    def logits(ids: Sequence[int]) -> torch.Tensor:
        peer.call("logits", ids=list(ids), out=str(out))
        return torch.from_numpy(np.load(out))

    return logits


def report(found: dict[str, dict[str, Distance]]) -> None:
    """Print every distance."""
    rows = [
        [model, other, f"{d.kl:.2e}", f"{100 * (1 - d.top1_differs):.2f} %", f"{d.logit:.3f}"]
        for model, distances in found.items()
        for other, d in distances.items()
    ]
    print(table(["model", "reference lane against", "mean KL, nats", "top 1 equal", "largest logit"], rows))


def goals(found: dict[str, dict[str, Distance]]) -> list[Goal]:
    """Return what shall hold of each model: the table of budgets has the limits."""
    kl, top1 = budget("reference_kl"), budget("reference_top1")
    for_each = []
    for model, distances in found.items():
        d = distances[F32]
        for_each.append(Goal(f"{model}: allowed divergence from f32 over measured", 1.0, kl / max(d.kl, 1e-12)))
        share = top1 / max(d.top1_differs, 1e-12)
        for_each.append(Goal(f"{model}: allowed share of other best tokens over measured", 1.0, share))
    return for_each
