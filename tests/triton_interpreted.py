"""Triton's kernels in its interpreter, against the plain operations: run as a program, because Triton decides once in a
process whether it interprets. Prints {case: what was wrong} as JSON; nothing wrong is "".

Every tensor that a wrapper makes has a poisoned body, so that what a kernel leaves out shows, and a guarded end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import exact_kernels
import numpy as np
import torch

from muser_prefill.kernels.exact import HeadNorm, Positions, Sight, choice
from muser_prefill.kernels.exact.choice import every_mantissa
from muser_prefill.kernels.exact.triton import roots as triton_roots
from muser_prefill.kernels.exact.triton.heads import _heads as launch_heads
from muser_prefill.kernels.exact.triton.kernels import triton_kernels
from muser_prefill.reference.conform import run_model
from muser_prefill.reference.decoder import TorchReferenceDecoder
from muser_wire.model.spec import Activation
from muser_wire.reference.attention import score_scale
from muser_wire.reference.conformance import cut, plain_runner
from muser_wire.reference.linear import IntegerWeight
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_ids, random_spec

CPU = torch.device("cpu")
GUARD = 64
MODEL_SEEDS, MODEL_CHUNKS = (2, 4), (13, 1, 5)
KERNELS, PLAIN = triton_kernels(CPU), exact_kernels.plain()
Case = tuple[str, Callable[[], str]]
guards: list[torch.Tensor] = []
allocate, like = torch.empty, torch.empty_like


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 113


def poisoned(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> torch.Tensor:
    size = shape[0] if shape and not isinstance(shape[0], int) else shape
    count = int(np.prod(size))
    whole = allocate(count + GUARD, dtype=dtype).fill_(poison(dtype))
    guards.append(whole[count:])
    return whole[:count].view(*size)


def checked(work: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]) -> str:
    """Return what differs, or that something was written past an end."""
    guards.clear()
    torch.empty, torch.empty_like = poisoned, lambda x: poisoned(x.shape, dtype=x.dtype)
    try:
        wrong = [f"{int((a != b).sum())} of {a.numel()}" for a, b in work() if not equal(a, b)]
    finally:
        torch.empty, torch.empty_like = allocate, like
    for guard in guards:
        whole = guard.isnan().all() if guard.dtype.is_floating_point else (guard == 113).all()
        if not whole:
            wrong.append("written past the end")
    return ", ".join(wrong)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def tensor(rng: np.random.Generator, *shape: int, **spread: int) -> torch.Tensor:
    return torch.from_numpy(exact_kernels.floats(rng, *shape, **spread))


def row_cases() -> Iterator[Case]:
    """Activations as such, integer by integer."""
    for tokens, columns in ((1, 32), (5, 96), (3, 640)):
        for what in ("quantised", "normed", "silu", "gelu", "gated"):
            yield f"rows {what} {tokens}x{columns}", lambda t=tokens, c=columns, w=what: checked(lambda: rows(w, t, c))
        yield f"rows added {tokens}x{columns}", lambda t=tokens, c=columns: checked(lambda: added(t, c))


def activations(products: Any, what: str, x: torch.Tensor, wide: torch.Tensor, weight: torch.Tensor) -> Any:
    columns = x.shape[1]
    if what == "quantised":
        return products.quantised(x)
    if what == "normed":
        return products.normed(x, weight, 1e-6)
    if what == "gated":
        return products.gated(x, wide[:, columns:])
    return products.activated(wide, Activation.SILU if what == "silu" else Activation.GELU_TANH)


def rows(what: str, tokens: int, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(tokens * columns)
    x, wide, weight = tensor(rng, tokens, columns), tensor(rng, tokens, 2 * columns, high=7), tensor(rng, columns)
    x[0, :32] = 0
    got, expected = (activations(k.products, what, x, wide, weight) for k in (KERNELS, PLAIN))
    values = got.high.float() * 64 + got.low.float()
    yield values.view(expected.values.shape), expected.values
    yield got.high.abs().max() <= 64, torch.tensor(True)
    yield got.low.abs().max() <= 32, torch.tensor(True)
    scales = torch.from_numpy(np.exp2(expected.exponents[..., 0].numpy().astype(np.float32)))
    yield got.scales.T, scales
    yield got.sums.T, expected.values.sum(-1) * scales


def added(tokens: int, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(columns)
    residual, x, weight = tensor(rng, tokens, columns), tensor(rng, tokens, columns), tensor(rng, columns)
    yield tuple(k.products.added(residual, x, weight, 1e-6) for k in (KERNELS, PLAIN))


def linear_cases() -> Iterator[Case]:
    """Tiles with and without rest, both sizes of tile, each form of weights and all of them joined."""
    for tokens, columns, outputs, forms in (
        (1, 32, 1, (0,)),
        (7, 96, 43, (0, 1, 2)),
        (16, 576, 64, (1,)),
        (17, 160, 130, (2,)),
        (70, 224, 131, (1, 0)),
        (64, 64, 128, (2, 2)),
    ):
        name = f"linear {tokens}x{columns}x{outputs} forms {forms}"
        yield name, lambda args=(tokens, columns, outputs, forms): checked(lambda: linear(*args))


def linear(
    tokens: int, columns: int, outputs: int, forms: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(tokens + columns)
    x = tensor(rng, tokens, columns)
    parts = [exact_kernels.matrix(rng, outputs + i, columns, form) for i, form in enumerate(forms)]
    residual = tensor(rng, tokens, sum(part.rows for part in parts))
    for rest in (None, residual):
        yield tuple(
            k.products.product(k.products.quantised(x), k.products.matrix(parts), rest) for k in (KERNELS, PLAIN)
        )


def head_cases() -> Iterator[Case]:
    for head_dim, half in ((16, 8), (64, 32), (80, 20), (128, 64), (256, 128), (256, 32)):
        yield f"heads {head_dim} turned {half}", lambda d=head_dim, h=half: checked(lambda: heads(d, h))


def heads(head_dim: int, half: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(head_dim)
    every = tensor(rng, 3, 5, head_dim, low=-20, high=19)
    angles = Positions(tensor(rng, 3, half, high=0), tensor(rng, 3, half, high=0))
    for norm in (None, HeadNorm(None, 1e-6), HeadNorm(tensor(rng, head_dim), 1e-6)):
        for positions in (None, angles):
            for x in (every[:, 2:], every[:, :0]):
                yield tuple(k.heads.turned(x, norm, positions) for k in (KERNELS, PLAIN))
                yield tuple(k.heads.plane(x, norm, positions) for k in (KERNELS, PLAIN))


def attention_cases() -> Iterator[Case]:
    """Odd prefixes, blocks that begin before the first held key, windows shorter and longer than a block."""
    for tokens, start, window, head_dim, kv_heads, repeats in (
        (1, 0, None, 64, 1, 1),
        (17, 67, None, 64, 2, 3),
        (70, 0, None, 128, 1, 2),
        (5, 190, 70, 128, 2, 2),
        (66, 63, 1, 64, 1, 1),
        (9, 130, 65, 256, 1, 2),
        (3, 64, None, 256, 1, 1),
        (20, 40, 33, 80, 2, 1),
        (4, 60, 7, 16, 2, 2),
        (6, 3, None, 96, 1, 1),
    ):
        case = (tokens, start, window, head_dim, kv_heads, repeats)
        name = f"attention {head_dim}: {tokens} after {start}, window {window}, heads {kv_heads}x{repeats}"
        yield name, lambda case=case: checked(lambda: attention(*case))


def attention(
    tokens: int, start: int, window: int | None, head_dim: int, kv_heads: int, repeats: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(head_dim + start)
    first = 0 if window is None else max(0, start - window + 1)
    q = tensor(rng, tokens, kv_heads * repeats, head_dim, low=-4, high=3)
    held = (start + tokens - first, kv_heads, head_dim)
    k, v = (PLAIN.heads.plane(tensor(rng, *held, low=-6, high=3), None, None) for _ in range(2))
    scale = score_scale(head_dim**-0.5)
    # What is behind a query stands far above the rest: a maximum rises, and falls away again behind a window.
    k[len(k) // 2] *= 16
    yield tuple(kernels.attention.attended(q, k, v, Sight(start, first, window), scale) for kernels in (KERNELS, PLAIN))


def roots() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x = every_mantissa(0, CPU)[::4096][1:].contiguous()
    expected = 1.0 / x.numpy().astype(np.float64), np.sqrt(x.numpy().astype(np.float64))
    yield from zip(triton_roots.roots(x), (torch.from_numpy(y.astype(np.float32)) for y in expected), strict=True)


def models() -> Iterator[Case]:
    for seed in MODEL_SEEDS:
        yield f"model {seed}", lambda seed=seed: model(seed)


def model(seed: int) -> str:
    """Return what of a small random model's planes and logits differs from the oracle's."""
    spec = random_spec(seed)
    ids = random_ids(spec, seed, sum(MODEL_CHUNKS))
    decoder = TorchReferenceDecoder(RandomWeights(spec, seed), device=CPU, whole=True, kernels=KERNELS)
    found = run_model(decoder, cut(ids, MODEL_CHUNKS))
    expected = plain_runner(NumpyArithmetic())(RandomWeights(spec, seed), [ids])
    pairs = zip(found.planes, expected.planes, strict=True)
    wrong = [f"layer {i}" for i, pair in enumerate(pairs) if not all(map(np.array_equal, *pair))]
    return ", ".join([*wrong, *([] if np.array_equal(found.logits, expected.logits) else ["logits"])])


def admission() -> str:
    """Return what a node admits, over fewer rows and mantissas than on a device, where they cost nothing."""
    choice.MANY_ROWS, choice.ROOT_EXPONENTS = 9, (0,)
    choice.every_mantissa = lambda exponent, device: every_mantissa(exponent, device)[::8192].contiguous()
    return " ".join(choice.triton_among(PLAIN, 64, CPU).admitted)


def admission_of_approximate_roots() -> str:
    """As `admission`, with the approximation that a GPU has for reciprocals."""
    exact = triton_roots.roots
    triton_roots.roots = lambda x: [exact(x)[0] * (1 + 2**-23), exact(x)[1]]
    try:
        return admission()
    finally:
        triton_roots.roots = exact


def other_order() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Groups of columns in another order: the same sum, rounded elsewhere."""
    rng = np.random.default_rng(5)
    x, weight = tensor(rng, 20, 320), exact_kernels.matrix(rng, 40, 320, 0)
    turned = IntegerWeight(weight.q[:, ::-1], weight.s[:, ::-1], None)
    other = x.view(20, 10, 32).flip(1).reshape(20, 320)
    got = KERNELS.products.product(KERNELS.products.quantised(other), KERNELS.products.matrix([turned]))
    yield got, PLAIN.products.product(PLAIN.products.quantised(x), PLAIN.products.matrix([weight]))


def nothing_stored() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield torch.empty(3, 4), torch.zeros(3, 4)


def stored_past_the_end() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    heads = torch.ones(2, 1, 64)
    to = torch.empty(1, 1, 64)
    launch_heads(heads, None, None, to)
    yield to, heads[:1]


def cases() -> dict[str, Callable[[], str]]:
    families = (row_cases, linear_cases, head_cases, attention_cases, models)
    return dict(case for family in families for case in family()) | {
        "roots": lambda: checked(roots),
        "fault order": lambda: checked(other_order),
        "fault nothing": lambda: checked(nothing_stored),
        "fault end": lambda: checked(stored_past_the_end),
        "admitted": admission,
        "admitted approximate": admission_of_approximate_roots,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: case() for name, case in cases().items()}))
