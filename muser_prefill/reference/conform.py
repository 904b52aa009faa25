"""The reference lane's conformance check on this node's device, with this node's decoder [N11].

`python -m muser_prefill.reference.conform` prints what the device gives, as JSON; `muser exact conformance` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.kernels.exact.choice import choose_exact
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.identities import Digest
from muser_wire.reference.canonical import Weights
from muser_wire.reference.conformance import ModelRun, Observed, observe, require
from muser_wire.reference.constants import HEAD_GROUP


def observe_device(device: torch.device, kernels: ExactKernels, *, thorough: bool = False) -> Observed:
    """Return what the device gives for each check: single steps and stages by plain operations, models by `kernels`."""

    def run(weights: Weights, chunks: Sequence[Sequence[int]]) -> ModelRun:
        return run_model(TorchReferenceDecoder(weights, device=device, whole=True, kernels=kernels), chunks)

    with torch.inference_mode():
        return observe(TorchArithmetic(device), run, thorough=thorough)


def run_model(decoder: TorchReferenceDecoder, chunks: Sequence[Sequence[int]]) -> ModelRun:
    """Return the planes of a prompt given in chunks, and the last token's logits."""
    tokens = sum(map(len, chunks))
    cache = decoder.new_cache(tokens)
    for chunk in chunks:
        logits = decoder.logits(chunk, cache)
    planes = []
    for layer in range(len(decoder.spec.layers)):
        keys, values = (plane.cpu().numpy() for plane in cache.planes(layer, 0, tokens))
        planes.append((keys, values))
    return ModelRun(planes, logits[-1].cpu().numpy())


def require_conformance(device: torch.device, kernels: ExactKernels) -> Digest:
    """Return the digest of a device that conforms.

    Raises:
        NumericsMismatch: it does not; the lane is not for this node.
    """
    return require(observe_device(device, kernels), f"torch on {device}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the device and what it gave; return the exit status. Judging is the reader's."""
    parser = argparse.ArgumentParser(prog="muser_prefill.reference.conform", description=__doc__)
    parser.add_argument("--device", default="cpu", help="torch's name of it")
    parser.add_argument("--thorough", action="store_true", help="every reciprocal and root, and more of 2 ** x")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    kernels = choose_exact(HEAD_GROUP, device)
    observed = observe_device(device, kernels, thorough=options.thorough)
    sys.stdout.write(json.dumps({"device": f"torch on {device}", "kernels": kernels.admitted, "observed": observed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
