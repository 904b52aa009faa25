from __future__ import annotations

import subprocess
import sys

import pytest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="macOS has one BLAS")


def run(code: str) -> str:
    """Run `code` in a fresh interpreter: what is loaded into this one cannot be unloaded."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@linux_only
def test_mlx_is_not_imported_and_the_answer_is_stable() -> None:
    out = run(
        "import sys; from muser_decode.blas import load_blas\n"
        "a, b = load_blas(), load_blas(); print('mlx' in sys.modules, a == b, a)"
    )
    assert out.startswith("False True ")


@linux_only
def test_a_missing_openblas_is_said_and_not_raised() -> None:
    out = run(
        "import muser_decode.blas as b\n"
        "b.OPENBLAS_NAMES = ('libnot-there.so.0',); b._openblas_in_process = lambda: None; print(b.load_blas())"
    )
    assert out.startswith("reference BLAS (no libnot-there.so.0")


@linux_only
def test_too_late_is_said() -> None:
    out = run(
        "import mlx.core; import muser_decode.blas as b\nb._openblas_in_process = lambda: None; print(b.load_blas())"
    )
    assert out.startswith("reference BLAS (mlx was imported before")


@linux_only
def test_products_are_right_after_loading() -> None:
    out = run(
        "from muser_decode.blas import load_blas; load_blas()\n"
        "import mlx.core as mx, numpy as np\n"
        "a = np.arange(48, dtype=np.float32).reshape(6, 8); b = np.arange(40, dtype=np.float32).reshape(8, 5)\n"
        "print(np.array_equal(np.array(mx.array(a) @ mx.array(b)), a.astype(np.int64) @ b.astype(np.int64)))"
    )
    assert out.strip() == "True"
