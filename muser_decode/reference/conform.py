"""The reference lane's conformance check on this node's device, with this node's decoder [N11].

`python -m muser_decode.reference.conform` prints what the device gives, as JSON; `muser exact conformance` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from muser_decode.blas import load_blas

# Before anything that imports mlx; a node has done it long before.
BLAS = load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from muser_decode.engine.contract import Decoder  # noqa: E402
from muser_decode.numerics import on_gpu  # noqa: E402
from muser_decode.reference.compiled.choice import compiled_operations, reference_decoder  # noqa: E402
from muser_decode.reference.mlx_arithmetic import MlxArithmetic  # noqa: E402
from muser_decode.reference.sums import library_adds_in_order  # noqa: E402
from muser_wire.identities import Digest  # noqa: E402
from muser_wire.reference.canonical import Weights  # noqa: E402
from muser_wire.reference.compiled.operations import Operations  # noqa: E402
from muser_wire.reference.conformance import ModelRun, Observed, observe, require  # noqa: E402
from muser_wire.reference.decoder import Planes  # noqa: E402
from muser_wire.reference.tiny import random_spec  # noqa: E402


def device_name() -> str:
    """Return what computes here, for messages."""
    return "MLX with Metal" if on_gpu() else f"MLX on the CPU with {BLAS}"


def observe_device(operations: Operations | None = None, *, thorough: bool = False) -> Observed:
    """Return what the device gives for each check: steps and stages by plain operations, models by the decoder.

    That is the one of `reference_decoder`.
    """

    def run(weights: Weights, chunks: Sequence[Sequence[int]]) -> ModelRun:
        return run_model(reference_decoder(weights, operations), chunks)

    return observe(MlxArithmetic(), run, thorough=thorough)


def run_model(decoder: Decoder, chunks: Sequence[Sequence[int]]) -> ModelRun:
    """Return the planes of a prompt given in chunks, and the last token's logits: that token is decoded.

    No window of the model may be so short that the prompt pushes rows out of the cache.
    """
    cache = decoder.new_cache()
    *before, last = chunks
    for chunk in (*before, last[:-1]):
        if chunk:
            decoder.prefill_chunk(chunk, cache)
    logits = np.array(decoder.step(mx.array(last[-1]), cache))
    planes: list[Planes] = []
    for layer in range(len(decoder.spec.layers)):
        k, v = cache.planes(layer, 0, cache.length)
        planes.append((np.array(k), np.array(v)))
    return ModelRun(planes, logits)


def require_conformance(operations: Operations | None = None) -> Digest:
    """Return the digest of a device that conforms, by compiled kernels where there are some.

    Raises:
        NumericsMismatch: it does not; the lane is not for this node.
    """
    return require(observe_device(operations), device_name())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the device and what it gave; return the exit status. Judging is the reader's."""
    parser = argparse.ArgumentParser(prog="muser_decode.reference.conform", description=__doc__)
    parser.add_argument("--thorough", action="store_true", help="every reciprocal and root, and more of 2 ** x")
    options = parser.parse_args(argv)
    operations = compiled_operations(random_spec(0))
    kernels = "plain" if operations is None else "compiled"
    observed = observe_device(operations, thorough=options.thorough)
    sums = "library" if library_adds_in_order() else "written out"
    sys.stdout.write(json.dumps({"device": device_name(), "kernels": kernels, "sums": sums, "observed": observed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
