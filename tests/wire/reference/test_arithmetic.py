"""All three libraries have every step of the protocol."""

from __future__ import annotations

import inspect

import pytest
import torch

from muser_decode.reference.mlx_arithmetic import MlxArithmetic
from muser_prefill.reference.torch_arithmetic import TorchArithmetic
from muser_wire.reference.arithmetic import Arithmetic
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic

STEPS = [name for name, _ in inspect.getmembers(Arithmetic, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("library", [NumpyArithmetic(), TorchArithmetic(torch.device("cpu")), MlxArithmetic()])
def test_a_library_has_every_step_with_the_same_arguments(library: Arithmetic) -> None:
    assert len(STEPS) == 26
    for name in STEPS:
        wanted = list(inspect.signature(getattr(Arithmetic, name)).parameters)[1:]
        assert list(inspect.signature(getattr(library, name)).parameters) == wanted
