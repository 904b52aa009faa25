"""One run of a model through Triton's kernels in its interpreter: a job as JSON on standard input, digests back.

Started by `make exact` with TRITON_INTERPRET=1 in its environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exact_runs import CPU, FirstLayers, torch_planes_run

from muser_prefill.kernels.exact.triton.kernels import triton_kernels
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.reference.canonical import CanonicalWeights


def main() -> None:
    job = json.load(sys.stdin)
    weights = FirstLayers(CanonicalWeights(open_checkpoint(Path(job["path"]))), job["layers"])
    print(json.dumps(torch_planes_run(weights, job["chunks"], triton_kernels(CPU)).plain()))


if __name__ == "__main__":
    main()
