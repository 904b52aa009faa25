from __future__ import annotations

import json

import mlx.core as mx
import pytest

from muser_decode.reference import conform
from muser_wire.errors import NumericsMismatch
from muser_wire.reference.conformance import golden_digest
from muser_wire.reference.golden import GOLDEN


def test_this_device_follows_the_rules() -> None:
    assert conform.require_conformance() == golden_digest()


def test_a_device_that_rounds_otherwise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sqrt = mx.sqrt
    monkeypatch.setattr(mx, "sqrt", lambda x: sqrt(x) * (1 + 2.0**-22))
    with pytest.raises(NumericsMismatch, match=r"MLX .* does not compute .* reciprocals and roots"):
        conform.require_conformance()


def test_a_decoder_that_rounds_otherwise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps may be right, and the fast decoder's own text wrong."""
    from muser_decode.reference import vectors

    true_call = vectors.Exp2.__call__
    monkeypatch.setattr(vectors.Exp2, "__call__", lambda self, y: true_call(self, y) * (1 + 2.0**-20))
    with pytest.raises(NumericsMismatch, match=r"model 2, whole: planes"):
        conform.require_conformance()


def test_the_command_prints_what_the_device_gave(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform.main([]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["device"].startswith("MLX ")
    assert printed["sums"] == "library"
    assert printed["observed"].items() <= GOLDEN.items()
