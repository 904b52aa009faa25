"""The reference lane's operations by Triton, together."""

from __future__ import annotations

import torch

from muser_prefill.kernels.exact import ExactKernels
from muser_prefill.kernels.exact.triton.attention import TritonAttention
from muser_prefill.kernels.exact.triton.heads import TritonHeads
from muser_prefill.kernels.exact.triton.products import TritonProducts


def triton_kernels(device: torch.device) -> ExactKernels:
    """Return the kernels for an NVIDIA GPU; for a CPU in a process that had TRITON_INTERPRET=1 from its start."""
    return ExactKernels(TritonProducts(device), TritonHeads(), TritonAttention())
