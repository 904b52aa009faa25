from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from muser_decode.reference import linear as module
from muser_decode.reference.linear import ActivationQuantiser, IntegerTiles, Side, TokenRows, linear_of
from muser_wire.errors import CheckpointError
from muser_wire.model.spec import ModelSpec
from muser_wire.reference.linear import IntegerWeight, linear, linear_arrays, quantised_input
from muser_wire.reference.numpy_arithmetic import NumpyArithmetic
from muser_wire.reference.tiny import RandomWeights, random_spec

NUMPY = NumpyArithmetic()
COLUMNS = 160


class Matrices(RandomWeights):
    """Matrices of any names: `name` is KIND-ROWS-COLUMNS, where the kind says bits, groups and offsets."""

    def linear(self, name: str, start: int = 0, stop: int | None = None) -> IntegerWeight:
        kind, rows, columns = name.split("-")
        group = 16 if kind == "small" else 32
        rng = np.random.default_rng(len(name) + int(rows))
        shape = (int(rows), int(columns) // group, group)
        q = rng.integers(0, 16, shape) if kind == "offset" else rng.integers(-128, 128, shape)
        s, m = (rng.standard_normal(shape[:2]).astype(np.float32) for _ in "sm")
        part = slice(start, stop)
        return IntegerWeight(q.astype(np.int8)[part], s[part], m[part] if kind == "offset" else None)

    def shape(self, name: str) -> tuple[int, ...]:
        _, rows, columns = name.split("-")
        return int(rows), int(columns)


def weights() -> Matrices:
    return Matrices(spec(), 0)


def spec() -> ModelSpec:
    return random_spec(0)


def rows(count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    return (rng.standard_normal((count, COLUMNS)) * np.exp2(rng.integers(-8, 8, (count, COLUMNS)))).astype(np.float32)


def expected(x: np.ndarray, name: str) -> np.ndarray:
    result: np.ndarray = linear(NUMPY, quantised_input(NUMPY, x), linear_arrays(NUMPY, weights().linear(name)))
    return result


@pytest.mark.parametrize("kind", ["plain", "offset", "small"])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 130])
def test_the_bytes_of_the_rules_for_any_number_of_rows(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCTS_NBYTES", 1 << 18)
    name = f"{kind}-200-{COLUMNS}"
    got = np.array(IntegerTiles(weights(), [name])(ActivationQuantiser()(mx.array(rows(count)))))
    np.testing.assert_array_equal(got, expected(rows(count), name))


def test_matrices_of_one_input_lie_side_by_side() -> None:
    names = [f"offset-65-{COLUMNS}", f"offset-63-{COLUMNS}", f"small-64-{COLUMNS}", f"plain-1-{COLUMNS}"]
    joined = linear_of(weights(), *names)
    assert isinstance(joined, Side)
    for count in (1, 3):
        got = np.array(joined(ActivationQuantiser()(mx.array(rows(count)))))
        np.testing.assert_array_equal(got, np.concatenate([expected(rows(count), name) for name in names], axis=1))


def test_a_matrix_is_loaded_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOAD_NBYTES", 4 * COLUMNS * 64)
    names = [f"offset-100-{COLUMNS}", f"offset-111-{COLUMNS}"]
    got = np.array(linear_of(weights(), *names)(ActivationQuantiser()(mx.array(rows(2)))))
    np.testing.assert_array_equal(got, np.concatenate([expected(rows(2), name) for name in names], axis=1))


@pytest.mark.parametrize("kind", ["plain", "offset", "small"])
def test_rows_of_an_embedding(kind: str) -> None:
    name, ids = f"{kind}-200-{COLUMNS}", [199, 0, 64, 64]
    values = weights().linear(name).values()[ids]
    for layout in (IntegerTiles(weights(), [name]), TokenRows(weights(), name)):
        np.testing.assert_array_equal(np.array(layout.embedded(mx.array(ids))), values)


def test_rows_that_no_matrix_has_are_refused() -> None:
    with pytest.raises(CheckpointError, match="have 3 rows, not those from 3 to 4"):
        module._rows_of(weights(), [f"plain-3-{COLUMNS}"], 3, 4)
