"""The compiled kernels as Python calls them: structures of pointers, as in the sources."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from muser_wire.errors import KernelUnavailable

_Pointer, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(pointers: str, numbers: str, rest: Iterable[tuple[str, type]] = ()) -> list[tuple[str, type]]:
    return [*((name, _Pointer) for name in pointers.split()), *((name, _I64) for name in numbers.split()), *rest]


class LinearCall(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = _fields(
        "values scales sums weights weight_scales offsets residual to",
        "rows outputs inputs stride",
        [("group", _I32)],
    )


class HeadsCall(ctypes.Structure):
    """`Heads` of heads.h."""

    _fields_ = _fields(
        "from_ weight cos sin to plane",
        "rows heads head_dim stride half",
        [("normed", _I32), ("eps", _F32), ("one_over_dim", _F32)],
    )


class IntegersCall(ctypes.Structure):
    """`Integers` of attention.h."""

    _fields_ = _fields("keys values key_scales value_scales", "count")


class AttentionCall(ctypes.Structure):
    """`Attention` of attention.h."""

    _fields_ = _fields(
        "queries keys values integers to",
        "tokens query_heads kv_heads head_dim start first window group",
        [("scale", _F32)],
    )


class QuantisedCall(ctypes.Structure):
    """`Quantised` of rows.h."""

    _fields_ = _fields("values scales sums", "")


_SIGNATURES = {
    "muser_linear": [ctypes.POINTER(LinearCall), _I32],
    "muser_heads": [ctypes.POINTER(HeadsCall), _I32],
    "muser_attention": [ctypes.POINTER(AttentionCall), _I32],
    "muser_derive": [ctypes.POINTER(AttentionCall), _I64, _I32],
    "muser_quantise": [_Pointer, _Pointer, _I32, _F32, _F32, _I64, _I64, ctypes.POINTER(QuantisedCall), _I32],
    "muser_activate": [_Pointer, _I32, _I64, _I64, ctypes.POINTER(QuantisedCall), _I32],
    "muser_gate": [_Pointer, _Pointer, _I64, _I64, _I64, ctypes.POINTER(QuantisedCall), _I32],
    "muser_add_normed": [_Pointer, _Pointer, _Pointer, _F32, _F32, _I64, _I64, _Pointer, _I32],
}


def load(path: Path) -> ctypes.CDLL:
    """Return the shared object with its functions' signatures.

    Raises:
        KernelUnavailable: it cannot be loaded, such as where there is no OpenMP library that it could use.
    """
    _bring_openmp()
    try:
        library = ctypes.CDLL(str(path))
        library.muser_threads.argtypes, library.muser_threads.restype = [], _I32
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{path} cannot be loaded: {error}") from error
    return library


def _bring_openmp() -> None:
    """Load the system's OpenMP library where the process has none yet; torch comes with its own."""
    if sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        # A compiler may do without: then nothing is missed.
        with suppress(OSError):
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def address(array: npt.NDArray[Any] | None) -> int | None:
    """Return where an array's numbers are; None for none."""
    if array is None:
        return None
    where: int = array.__array_interface__["data"][0]
    return where
