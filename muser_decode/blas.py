"""Which BLAS mlx multiplies with on the CPU.

On Linux the mlx wheel links a reference BLAS that is 5 to 70 times slower than OpenBLAS. A library that
is already in the process's global namespace wins, so OpenBLAS is loaded before mlx is. This module
imports no mlx, and is called before anything that does.
"""

from __future__ import annotations

import ctypes
import sys

OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblas.so")
REFERENCE = "reference BLAS"


def load_blas() -> str:
    """Make mlx use OpenBLAS where that can be had, and return what it will use, as text for a log.

    A missing OpenBLAS is no error: results are the same to rounding, only slower.
    """
    if sys.platform != "linux":
        return "Accelerate" if sys.platform == "darwin" else REFERENCE
    loaded_before = _openblas_in_process()
    if loaded_before is not None:
        return loaded_before
    if "mlx.core" in sys.modules:
        return f"{REFERENCE} (mlx was imported before OpenBLAS could be loaded)"
    for name in OPENBLAS_NAMES:
        try:
            return _describe(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL))
        except OSError:
            continue
    return f"{REFERENCE} (no {OPENBLAS_NAMES[0]}: prompts and answers are several times slower than with OpenBLAS)"


def _openblas_in_process() -> str | None:
    """Return the OpenBLAS of the global namespace (preloaded, or loaded by an earlier call), or None."""
    everything = ctypes.CDLL(None)
    return _describe(everything) if hasattr(everything, "openblas_get_config") else None


def _describe(library: ctypes.CDLL) -> str:
    """Return name, version and kernel set of an OpenBLAS, such as "OpenBLAS 0.3.21 ... Cooperlake"."""
    try:
        get_config = library.openblas_get_config
    except AttributeError:
        return "OpenBLAS"
    get_config.restype = ctypes.c_char_p
    text: bytes = get_config()
    return text.decode(errors="replace").strip()
