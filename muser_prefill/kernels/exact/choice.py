"""Which kernels of the reference lane are used here: those that give the plain operations' bytes on fixed vectors."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from muser_prefill.kernels.admission import admit_exact, fixed_vector
from muser_prefill.kernels.exact import Attention, ExactKernels, HeadNorm, Heads, Positions, Products, Sight
from muser_prefill.kernels.exact.compiled import compiled_kernels
from muser_prefill.kernels.exact.reference import plain_kernels
from muser_wire.errors import KernelUnavailable
from muser_wire.home import muser_home
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import score_scale
from muser_wire.reference.compiled.build import shared_object
from muser_wire.reference.compiled.library import load
from muser_wire.reference.constants import WEIGHT_GROUP
from muser_wire.reference.linear import IntegerWeight

logger = logging.getLogger(__name__)

COMPILED, TRITON = "compiled", "triton"
ROOTS = f"exact.roots.{TRITON}"
"""Not an operation by itself: the reciprocals and square roots in all that Triton compiles."""

# Odd sizes, more rows than a tile and outputs than a panel.
ROWS, GROUPS, OUTPUTS, EPS = 37, 5, 43, 1e-5
MANY_ROWS = 1037
"""An error in a last place shows in one of some thousand values, once they are rounded to 12 bits."""
KV_HEADS, REPEATS, PREFIX = 2, 3, 67
WINDOWS = (None, 41)
ALIGNED_OUTPUTS = 64
"""Triton compiles a kernel anew for sizes that 16 divides."""
ROOT_EXPONENTS = (-100, -2, -1, 0, 1, 100)
"""Of the numbers whose reciprocals and square roots are tried, each with every mantissa."""
SPREAD = 6
"""Magnitudes reach over so many powers of two to each side of 1."""


def choose_exact(head_dim: int, device: torch.device) -> ExactKernels:
    """Return the kernels for heads of a size on this device: the plain operations, but for what is admitted."""
    plain = plain_kernels(device)
    try:
        if device.type == "cpu":
            candidate = compiled_kernels(load(shared_object(muser_home() / "kernels")))
            return admitted_among(candidate, plain, COMPILED, head_dim, device)
        if device.type == "cuda":
            return triton_among(plain, head_dim, device)
    except KernelUnavailable as error:
        logger.warning("kernel_refused name=exact.* cause=%s", error)
    return plain


def triton_among(plain: ExactKernels, head_dim: int, device: torch.device) -> ExactKernels:
    """Return `plain` with those Triton kernels that give its bytes; none where a reciprocal or square root is wrong.

    Raises:
        KernelUnavailable: there is no Triton here.
    """
    try:
        from muser_prefill.kernels.exact.triton.kernels import triton_kernels  # noqa: PLC0415  (optional)
        from muser_prefill.kernels.exact.triton.roots import roots  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise KernelUnavailable(f"Triton cannot be imported: {error}") from error
    for exponent in ROOT_EXPONENTS:
        x = every_mantissa(exponent, device)
        # Rounded once more from float64, both are right: it has more than twice the bits.
        if not admit_exact(
            ROOTS,
            lambda x=x: roots(x),  # type: ignore[misc]
            lambda x=x: [(1.0 / x.double()).float(), x.double().sqrt().float()],  # type: ignore[misc]
        ):
            return plain
    chosen = admitted_among(triton_kernels(device), plain, TRITON, head_dim, device)
    return replace(chosen, admitted=(ROOTS, *chosen.admitted))


def every_mantissa(exponent: int, device: torch.device) -> torch.Tensor:
    """Return each float32 from 2 ** exponent up to twice that."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device=device)
    return (mantissas + ((exponent + 127) << 23)).view(torch.float32)


def admitted_among(
    candidate: ExactKernels, plain: ExactKernels, kind: str, head_dim: int, device: torch.device
) -> ExactKernels:
    """Return `plain` with those of `candidate` that give its bytes, under names such as "exact.products.compiled"."""
    names: list[str] = []
    chosen = plain
    name = f"exact.products.{kind}"
    if admit_exact(name, lambda: both(candidate.products, device), lambda: both(plain.products, device)):
        chosen, names = replace(chosen, products=candidate.products), [*names, name]
    name, dim = f"exact.heads.{kind}", head_dim
    if admit_exact(name, lambda: heads(candidate.heads, dim, device), lambda: heads(plain.heads, dim, device)):
        chosen, names = replace(chosen, heads=candidate.heads), [*names, name]
    name = f"exact.attention.{kind}"
    if admit_exact(
        name, lambda: attention(candidate.attention, dim, device), lambda: attention(plain.attention, dim, device)
    ):
        chosen, names = replace(chosen, attention=candidate.attention), [*names, name]
    return replace(chosen, admitted=tuple(names))


def both(kernel: Products, device: torch.device) -> list[torch.Tensor]:
    """Return the results of `products` for odd and for round numbers of outputs."""
    return [*products(kernel, device), *products(kernel, device, ALIGNED_OUTPUTS)]


def products(kernel: Products, device: torch.device, outputs: int = OUTPUTS) -> list[torch.Tensor]:
    """Return the results of every operation on fixed vectors, seen through matrices of every form."""
    columns = GROUPS * WEIGHT_GROUP
    x, gate = (_spread((MANY_ROWS, columns), seed, device) for seed in (1, 2))
    gate_up = torch.cat([gate, x], 1)
    weight = _spread((columns,), 3, device)
    forms = ((32, True), (32, False), (16, False))
    matrix = kernel.matrix([_matrix(*form, outputs) for form in forms])
    residual = _spread((MANY_ROWS, len(forms) * outputs), 4, device)
    inputs = [
        kernel.quantised(x),
        kernel.normed(x, weight, EPS),
        kernel.activated(gate_up, Activation.SILU),
        kernel.activated(gate_up, Activation.GELU_TANH),
        # Rows of a gate lie in a wider matrix.
        kernel.gated(x, gate_up[:, :columns]),
    ]
    results = [kernel.product(rows, matrix) for rows in inputs]
    one = kernel.product(kernel.quantised(x[:1].contiguous()), matrix)
    return [*results, one, kernel.product(inputs[0], matrix, residual), kernel.added(x, gate, weight, EPS)]


def heads(kernel: Heads, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    """Return heads with and without norm and positions, as float32 and as planes."""
    every = _spread((ROWS, KV_HEADS + 1, head_dim), 5, device)
    cos, sin = (fixed_vector((ROWS, head_dim // 2), seed, torch.float32, device) for seed in (6, 7))
    results = []
    for norm in (None, HeadNorm(None, EPS), HeadNorm(_spread((head_dim,), 8, device), EPS)):
        for positions in (None, Positions(cos, sin)):
            results.append(kernel.turned(every[:, 1:], norm, positions))
            results.append(kernel.plane(every[:, 1:], norm, positions))
    return results


def attention(kernel: Attention, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    """Return attention of queries after a prefix, for every kind of window."""
    stop, heads_count = PREFIX + ROWS, KV_HEADS * REPEATS
    q = fixed_vector((ROWS, heads_count, head_dim), 9, torch.float32, device)
    planes = [fixed_vector((stop, KV_HEADS, head_dim), seed, torch.float16, device) for seed in (10, 11)]
    # What was rounded to a plane has no subnormals.
    k, v = (torch.where(plane.abs() < 2.0**-14, torch.zeros_like(plane), plane) for plane in planes)
    results = []
    for window in WINDOWS:
        first = 0 if window is None else PREFIX - window + 1
        sight = Sight(PREFIX, first, window)
        results.append(kernel.attended(q, k[first:], v[first:], sight, score_scale(head_dim**-0.5)))
    return results


def _spread(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Return normal values times powers of two."""
    values = fixed_vector(shape, seed, torch.float32, torch.device("cpu"))
    exponents = torch.randint(-SPREAD, SPREAD, shape, generator=torch.Generator().manual_seed(seed))
    return torch.ldexp(values, exponents).to(device)


def _matrix(group: int, offsets: bool, outputs: int) -> IntegerWeight:
    rng = np.random.default_rng(group + offsets)
    shape = (outputs, GROUPS * WEIGHT_GROUP // group)
    q = rng.integers(-128, 128, (*shape, group)).astype(np.int8)
    s, m = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    return IntegerWeight(q, s, m if offsets else None)
