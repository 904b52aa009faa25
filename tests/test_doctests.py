"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import muser_decode
import muser_prefill
import muser_wire

MODULES = [
    info.name
    for package in (muser_wire, muser_prefill, muser_decode)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    # Generated, programs, and what imports a package that is not everywhere.
    if not any(part in info.name for part in (".stubs.", ".__main__", ".triton"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 40
