"""That tests multiply with what the nodes multiply with."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

# The sum of so many products depends on how they are added up.
PRODUCT = """
import hashlib, sys
import numpy as np
a, b = (np.random.default_rng(i).standard_normal((257, 257), dtype=np.float32) for i in range(2))
if sys.argv[1] == "torch":
    import torch
    torch.set_num_threads(1)
    c = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
else:
    from muser_decode.blas import load_blas
    load_blas()
    import mlx.core as mx
    c = np.array(mx.matmul(mx.array(a), mx.array(b), stream=mx.cpu))
print(c.tobytes().hex())
"""


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_a_product_is_the_one_of_a_process_of_its_own(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = subprocess.run([sys.executable, "-c", PRODUCT, library], capture_output=True, text=True, check=True).stdout
    here: list[str] = []
    monkeypatch.setattr(sys, "argv", ["", library])
    threads = torch.get_num_threads()
    try:
        exec(PRODUCT, {"print": here.append})
    finally:
        torch.set_num_threads(threads)
    # Bytes as floats, for a readable difference.
    assert np.array_equal(floats(here[0]), floats(alone))


def floats(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.float32)
