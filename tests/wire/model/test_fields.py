from __future__ import annotations

from pathlib import Path

import pytest

from muser_wire.errors import CheckpointError
from muser_wire.model.fields import Fields

FIELDS = Fields(Path("f"), {"n": 3, "x": 0.5, "t": "text", "b": True, "none": None, "long": "y" * 500, "zero": 0})


def test_values_of_the_right_type() -> None:
    assert (FIELDS.integer("n"), FIELDS.number("x"), FIELDS.number("n")) == (3, 0.5, 3.0)
    assert (FIELDS.text("t"), FIELDS.flag("b", default=False)) == ("text", True)
    assert (FIELDS.token_id("zero"), FIELDS.token_id("none"), FIELDS.token_id("absent")) == (0, None, None)


def test_null_counts_as_absent() -> None:
    assert not FIELDS.has("none")
    assert FIELDS.integer("none", default=7) == 7
    with pytest.raises(CheckpointError, match="f: none is missing"):
        FIELDS.integer("none")


def test_a_range_is_checked() -> None:
    with pytest.raises(CheckpointError, match="n is 3; expected a whole number from 1 to 2"):
        FIELDS.integer("n", at_most=2)
    with pytest.raises(CheckpointError, match="zero is 0; expected a whole number from 1"):
        FIELDS.integer("zero")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CheckpointError) as caught:
        FIELDS.flag("long", default=False)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize("value", [-1, 2**40, True, "1", 1.0])
def test_a_token_id_is_a_small_whole_number(value: object) -> None:
    with pytest.raises(CheckpointError, match="expected a token id"):
        Fields(Path("f"), {"id": value}).token_id("id")


def test_require_names_the_value_and_the_reason() -> None:
    FIELDS.require("absent", 1, why="never")
    FIELDS.require("n", 2, 3, why="never")
    with pytest.raises(CheckpointError, match="f: n is 3: only two"):
        FIELDS.require("n", 2, why="only two")
