"""Triton's kernels compiled for GPUs that are not here: run as a program. Prints what came out, as JSON.

The wrappers run over CPU tensors, and every launch is taken down instead of started: so what is compiled is what a
device would get, with the same specialisation. Each is then compiled for the targets, with contraction kept off as the
wrappers ask for, and once more with it allowed where `CONTRACTED` names it: a check that cannot fail is none.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from muser_prefill.kernels.exact import HeadNorm, Positions, Sight
from muser_prefill.kernels.exact.triton import roots
from muser_prefill.kernels.exact.triton.kernels import triton_kernels
from muser_wire.model.spec import Activation
from muser_wire.reference.linear import IntegerWeight

CPU = torch.device("cpu")
TARGETS = {"sm_121": 121, "sm_90": 90}
CONTRACTED = "linear, offsets"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
STEP = re.compile(r"^\s*(?:@%?\w+ )?(\w+(?:\.\w+)*\.f32(?:x2)?)\s", re.MULTILINE)
"""An instruction of PTX whose result is float32, alone or in pairs."""
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
FUSED = re.compile(r"\bFFMA2?\b")
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launches() -> dict[str, Launch]:
    """Return every kernel as the wrappers start it, at the sizes of real models."""
    taken: list[Launch] = []
    JITFunction.run = lambda self, *args, grid, warmup, **options: taken.append((self, args, options))
    named: dict[str, Launch] = {}

    def note(*names: str) -> None:
        """Name the launches since the last time; those named "" have been seen before."""
        named.update((name, launch) for name, launch in zip(names, taken, strict=True) if name)
        taken.clear()

    kernels = triton_kernels(CPU)
    products, heads = kernels.products, kernels.heads
    x, wide = torch.zeros(128, 4096), torch.zeros(128, 8192)
    activations = products.quantised(x)
    note("quantise")
    products.normed(x, x[0], 1e-5)
    note("norm and quantise")
    products.activated(wide, Activation.SILU)
    note("silu")
    products.activated(wide, Activation.GELU_TANH)
    note("gelu")
    products.gated(x, wide[:, 4096:])
    note("gate")
    products.added(x, x, x[0], 1e-5)
    note("norm and add")
    products.product(activations, products.matrix([matrix(32, offsets=False)]))
    note("linear")
    products.product(activations, products.matrix([matrix(32, offsets=True)]), x)
    note("linear, offsets")
    products.product(activations, products.matrix([matrix(16, offsets=False)]), x)
    note("linear, groups of 16")
    positions = Positions(torch.zeros(128, 64), torch.zeros(128, 64))
    heads.plane(torch.zeros(128, 8, 128), HeadNorm(torch.ones(128), 1e-6), positions)
    note("heads")
    for head_dim in (64, 128, 256):
        planes = torch.zeros(640, 2, head_dim, dtype=torch.float16)
        kernels.attention.attended(torch.zeros(128, 8, head_dim), planes, planes, Sight(512, 0, None), 0.1)
        first = head_dim == 64
        note("head integers" if first else "", "", "value integers" if first else "", f"attention {head_dim}")
    roots.roots(torch.ones(1 << 20))
    note("roots")
    # Small tiles; a number that is 1 is compiled in.
    one = matrix(32, offsets=False)
    products.product(products.quantised(x[:3]), products.matrix([IntegerWeight(one.q[:1], one.s[:1], None)]))
    note("", "linear, few tokens")
    heads.turned(torch.zeros(3, 1, 80), None, None)
    note("heads as they are")
    planes = torch.zeros(3, 1, 80, dtype=torch.float16)
    kernels.attention.attended(torch.zeros(3, 1, 80), planes, planes, Sight(0, 0, 7), 0.1)
    note("head integers, groups of 16", "", "value integers, 80", "attention 80, few queries")
    return named


def matrix(group: int, *, offsets: bool) -> IntegerWeight:
    q = np.zeros((4096, 4096 // group, group), np.int8)
    s = np.zeros(q.shape[:2], np.float32)
    return IntegerWeight(q, s, s if offsets else None)


def compiled(launch: Launch, capability: int, **others: Any) -> dict[str, Any]:
    """Compile a launch for a target; return its PTX's float32 steps, its machine code's fused ones, and its needs."""
    function, args, options = launch
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = options | {"debug": False} | others
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, rest = bind(*args, **options)
    parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, rest)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source = ASTSource(function, signature, constants, attributes)
        kernel = triton.compile(source, target=target, options=parsed.__dict__)
    spills = SPILLS.findall(log.getvalue())
    return {
        "steps": dict(collections.Counter(STEP.findall(kernel.asm["ptx"]))),
        "int8_products": len(re.findall(r"mma[\w.]*\.s8\.s8", kernel.asm["ptx"])),
        "fused": len(FUSED.findall(machine_code(kernel.asm["cubin"]))),
        "shared": kernel.metadata.shared,
        "spilled": [sum(int(a) + int(b) for a, b in spills)] if spills else [],
        "registers": max(map(int, REGISTERS.findall(log.getvalue())), default=0),
    }


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        named = launches()
        for target, capability in TARGETS.items():
            found[target] = {name: compiled(launch, capability) for name, launch in named.items()}
        found["contracted"] = compiled(named[CONTRACTED], TARGETS["sm_121"], enable_fp_fusion=True)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
