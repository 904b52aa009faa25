"""Does an NVIDIA GPU do what the producer needs of it, and how fast? `make device`, or this module as a program.

Kernels against their plain references, the reference lane's conformance set, planes and logits of a model against the
CPU's bytes, and the prefill rate of both lanes. Prints one table. Without such a GPU it says so and is content.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from muser_prefill.decoder import TorchDecoder
from muser_prefill.engine.runner import Decoder
from muser_prefill.kernels.attention import admit_attention
from muser_prefill.kernels.attention.sdpa import sdpa_attention
from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.numerics import COMPUTE_NAMES
from muser_prefill.reference.conform import observe_device, run_model
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.errors import WireError
from muser_wire.geometry import ElementType
from muser_wire.home import muser_home
from muser_wire.model.checkpoint import Checkpoint, open_checkpoint
from muser_wire.model.fetch import fetched_path
from muser_wire.reference.canonical import CanonicalWeights
from muser_wire.reference.conformance import ModelRun, cut, differing
from muser_wire.reference.tiny import random_ids

EXIT_FAILED = 1
NO_GPU = "not run: no NVIDIA GPU"
CPU = torch.device("cpu")
SEED = 1
COMPARED_TOKENS = 512
COMPARED_CHUNKS = (101, 1)
"""The GPU gets the compared prompt in these chunks and the rest; the CPU gets it whole."""
GPU_KERNELS = tuple(f"exact.{part}.triton" for part in ("roots", "products", "heads", "attention"))


@dataclass(frozen=True)
class Row:
    """A line of the table; `passed` is None for what is measured, not judged."""

    name: str
    passed: bool | None
    text: str

    def __str__(self) -> str:
        """Return the line."""
        verdict = {True: "ok", False: "FAILED", None: ""}[self.passed]
        return f"{self.name:<34} {verdict:<7} {self.text}".rstrip()


@dataclass(frozen=True)
class Options:
    """One run: `tokens` and `rounds` of the rates."""

    model: str
    device: str
    tokens: int
    rounds: int

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Options:
        """Return the options of a command line."""
        parser = argparse.ArgumentParser(prog="muser_prefill.device", description=__doc__)
        parser.add_argument("--model", default="smollm2", help="a fetched model's name, or a path")
        parser.add_argument("--device", default="cuda", help="torch's name of it; cpu tries this program itself")
        parser.add_argument("--tokens", type=int, default=2048, help="prompt length of the rates")
        parser.add_argument("--rounds", type=int, default=5, help="measurements of each lane, in turn")
        return cls(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 when a check fails."""
    options = Options.parse(argv)
    if options.device == "cuda" and not (torch.version.cuda and torch.cuda.is_available()):
        sys.stdout.write(f"{NO_GPU}\n")
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        rows = [_shown(row) for row in examine(options)]
    except WireError as error:
        sys.stderr.write(f"muser_prefill.device: {error}\n")
        return EXIT_FAILED
    return EXIT_FAILED if any(row.passed is False for row in rows) else 0


def _shown(row: Row) -> Row:
    sys.stdout.write(f"{row}\n")
    sys.stdout.flush()
    return row


def examine(options: Options) -> Iterator[Row]:
    """Yield the table's rows as they become known.

    Raises:
        WireError: the model cannot be opened.
    """
    device = torch.device(options.device)
    checkpoint = open_checkpoint(fetched_path(options.model, muser_home()))
    yield Row("device", None, _description(device))
    yield from _native_kernels(checkpoint.spec.head_dim, device)
    kernels = choose_exact(checkpoint.spec.head_dim, device)
    yield from _reference_kernels(kernels, device)
    with torch.inference_mode():
        wrong = differing(observe_device(device, kernels, thorough=device.type == "cuda"))
    yield Row("conformance", not wrong, ", ".join(wrong) or "every golden hash")
    weights = CanonicalWeights(checkpoint)
    decoder = TorchReferenceDecoder(weights, device=device, whole=True, kernels=kernels)
    yield from _against_cpu(decoder, TorchReferenceDecoder(weights, device=CPU, whole=True))
    # As a producer has it: nothing that only logits need.
    yield from _rates(checkpoint, TorchReferenceDecoder(weights, device=device, kernels=kernels), device, options)


def _description(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, torch {torch.__version__}"


def _native_kernels(head_dim: int, device: torch.device) -> Iterator[Row]:
    """Compare the native lane's attention on this device, a library's, with its plain reference."""
    for dtype, name in COMPUTE_NAMES.items():
        passed = admit_attention("attention.sdpa", sdpa_attention, head_dim, dtype, device)
        yield Row(f"native attention, {name}", passed, "within its budget" if passed else "see the log above")


def _reference_kernels(kernels: ExactKernels, device: torch.device) -> Iterator[Row]:
    """Say which of the reference lane's kernels are admitted; a GPU shall have them all."""
    expected = GPU_KERNELS if device.type == "cuda" else ()
    for name in dict.fromkeys([*expected, *kernels.admitted]):
        admitted = name in kernels.admitted
        yield Row(name, admitted, "equal bytes" if admitted else "refused: the log above says why")


def _against_cpu(decoder: TorchReferenceDecoder, oracle: TorchReferenceDecoder) -> Iterator[Row]:
    """Compare planes and logits of a pinned random prompt, byte for byte."""
    tokens = min(COMPARED_TOKENS, decoder.spec.max_positions)
    ids = random_ids(decoder.spec, SEED, tokens)
    found, expected = run_model(decoder, cut(ids, COMPARED_CHUNKS)), run_model(oracle, [ids])
    different = _different_layers(found, expected)
    layers = len(expected.planes)
    yield Row(
        f"planes, {tokens} tokens", not different, f"{layers - len(different)} of {layers} layers equal the CPU's"
    )
    same = np.asarray(found.logits) == np.asarray(expected.logits)
    yield Row("logits", bool(same.all()), f"{np.count_nonzero(same)} of {same.size} equal the CPU's")


def _different_layers(found: ModelRun, expected: ModelRun) -> list[int]:
    return [
        layer
        for layer, pair in enumerate(zip(found.planes, expected.planes, strict=True))
        if any(a.tobytes() != b.tobytes() for a, b in zip(*pair, strict=True))
    ]


def _rates(
    checkpoint: Checkpoint, reference: TorchReferenceDecoder, device: torch.device, options: Options
) -> Iterator[Row]:
    """Measure both lanes' prefill in turn; the first round of each is not counted."""
    native = TorchDecoder(checkpoint, dtype=torch.bfloat16, kv_element=ElementType.BF16, device=device)
    tokens = min(options.tokens, checkpoint.spec.max_positions)
    ids = random_ids(checkpoint.spec, SEED, tokens)
    lanes: dict[str, Decoder] = {"native bf16": native, "reference": reference}
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(options.rounds + 1):
        for name, decoder in lanes.items():
            elapsed = _timed(lambda decoder=decoder: _prefill(decoder, ids), device)  # type: ignore[misc]
            if number:
                seconds[name].append(elapsed)
    for name, samples in seconds.items():
        median = statistics.median(samples)
        yield Row(f"prefill of {tokens}, {name}", None, f"{median * 1e3:.1f} ms, {tokens / median:.0f} tokens/s")
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    yield Row("reference / native bf16", None, f"{ratio:.2f} x its rate, median of {options.rounds} rounds")


def _prefill(decoder: Decoder, ids: Sequence[int]) -> None:
    decoder.prefill_chunk(ids, decoder.new_cache(len(ids)), lambda layer: None)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of some work, with what it left to a GPU."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
