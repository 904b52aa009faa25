"""Every Triton kernel compiled for GB10 and for Hopper, where neither is: steps, fused ones, memory and spills."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from muser_wire.errors import KernelUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that one program may have on sm_121."""
OF_A_DIVISION, OF_A_ROOT, OF_BOTH_SLOW_PATHS = 5, 2, 15
"""Fused steps in the machine code of `div.rn.f32` and `sqrt.rn.f32`, which are correctly rounded by them."""
WITH_PRODUCTS = {
    *("linear", "linear, offsets", "linear, groups of 16", "linear, few tokens"),
    *("attention 64", "attention 128", "attention 256", "attention 80, few queries"),
}
STORED_ALONE = "heads as they are"
"""A kernel without a step."""


class Refusing:
    """A kernel that cannot be started, for the reason given."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **options: Any) -> None:
            raise self.cause

        start.__name__ = "refusing"
        self.__name__ = "refusing"
        return start


@pytest.mark.parametrize(
    "cause",
    [("triton.errors", "TritonError", ("no such instruction",)), ("subprocess", "CalledProcessError", (1, ["cc"]))],
)
def test_a_kernel_that_cannot_be_compiled_is_named(cause: tuple[str, str, tuple[Any, ...]]) -> None:
    pytest.importorskip("triton")
    from muser_prefill.kernels.exact.triton.launch import launch

    module, name, arguments = cause
    error = getattr(importlib.import_module(module), name)(*arguments)
    with pytest.raises(KernelUnavailable, match="Triton cannot compile refusing: "):
        launch(Refusing(error), (1,), warps=4)


def test_an_empty_grid_starts_nothing() -> None:
    pytest.importorskip("triton")
    from muser_prefill.kernels.exact.triton.launch import launch

    launch(Refusing(OSError("started")), (0, 3), warps=4)


@pytest.fixture(params=["sm_121", "sm_90"])
def kernels(built: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = built[request.param]
    assert len(found) == 21
    return found


def contractions(steps: dict[str, int]) -> dict[str, int]:
    """What is fused, or may be fused later because it has no rounding mode of its own."""
    return {step: n for step, n in steps.items() if re.match(r"fma|(add|sub|mul)\.(?!rn\.)|mad|\w+\.approx", step)}


def test_every_step_rounds_by_itself(kernels: dict[str, Any]) -> None:
    assert {
        name: contractions(kernel["steps"]) for name, kernel in kernels.items() if contractions(kernel["steps"])
    } == {}
    without = {name for name, kernel in kernels.items() if not any(".rn.f32" in step for step in kernel["steps"])}
    assert without == {STORED_ALONE}


def test_machine_code_fuses_within_divisions_and_roots_alone(kernels: dict[str, Any]) -> None:
    for name, kernel in kernels.items():
        divisions, roots = (kernel["steps"].get(step, 0) for step in ("div.rn.f32", "sqrt.rn.f32"))
        allowed = OF_A_DIVISION * divisions + OF_A_ROOT * roots + (OF_BOTH_SLOW_PATHS if divisions + roots else 0)
        assert kernel["fused"] <= allowed, name


def test_the_reader_sees_what_triton_contracts_by_default(built: dict[str, Any]) -> None:
    assert contractions(built["contracted"]["steps"]).keys() >= {"fma.rn.f32x2", "add.f32"}
    assert built["contracted"]["fused"] > 0


def test_products_are_of_int8_on_tensor_cores(kernels: dict[str, Any]) -> None:
    assert {name for name, kernel in kernels.items() if kernel["int8_products"]} == WITH_PRODUCTS


def test_a_program_fits_a_gb10(kernels: dict[str, Any], record_property: Any) -> None:
    for name, kernel in kernels.items():
        needs = {key: kernel[key] for key in ("shared", "registers", "spilled")}
        record_property(name, str(needs))
        assert kernel["shared"] <= SHARED_LIMIT, name
        # The assembler's own report was there to read.
        assert kernel["registers"] > 0, name
        assert kernel["spilled"] == [0], name
