"""Every Triton kernel in the interpreter: equal to the plain operations byte for byte."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("family", "count"), [("rows ", 18), ("linear ", 6), ("heads ", 6), ("attention ", 10), ("model ", 2), ("roots", 1)]
)
def test_a_kernel_gives_the_plain_operations_bytes(interpreted: dict[str, str], family: str, count: int) -> None:
    cases = {name: wrong for name, wrong in interpreted.items() if name.startswith(family)}
    assert len(cases) == count
    assert {name: wrong for name, wrong in cases.items() if wrong} == {}


def test_the_comparison_sees_an_order_an_omission_and_an_end(interpreted: dict[str, str]) -> None:
    assert interpreted["fault nothing"] == "12 of 12"
    assert interpreted["fault end"] == "written past the end"
    differing, _, outputs = interpreted["fault order"].partition(" of ")
    assert int(outputs) == 800
    assert int(differing) > 80


def test_a_node_admits_them_with_exact_roots_alone(interpreted: dict[str, str]) -> None:
    parts = ("roots", "products", "heads", "attention")
    assert interpreted["admitted"] == " ".join(f"exact.{part}.triton" for part in parts)
    assert interpreted["admitted approximate"] == ""
