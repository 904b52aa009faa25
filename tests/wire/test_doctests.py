"""Every example in a docstring of the ground floor is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import muser_wire

MODULES = [
    info.name
    for info in pkgutil.walk_packages(muser_wire.__path__, "muser_wire.")
    if not info.name.startswith("muser_wire.stubs.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(found) >= 5
