from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from muser_wire.cli import verify
from muser_wire.cli.__main__ import main
from muser_wire.cli.verify import Difference, compare
from muser_wire.errors import VerificationError
from muser_wire.model.checkpoint import open_checkpoint
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf
from muser_wire.verification import Evidence, Greedy


@pytest.fixture
def no_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: replace(oracle, library="no_such_library") for name, oracle in verify.ORACLES.items()}
    monkeypatch.setattr(verify, "ORACLES", absent)


def make_evidence(**changes: object) -> Evidence:
    rng = np.random.default_rng(0)
    planes = tuple(tuple(rng.normal(size=(2, 9, 2, 4)).astype(np.float32)) for _ in range(3))
    logits = rng.normal(size=(4, 50)).astype(np.float32)
    return replace(Evidence(planes, logits, Greedy((1, 2, 3), (0.5, 0.4, 0.3))), **changes)


def test_equal_evidence_misses_nothing() -> None:
    (comparison,), misses = compare({"torch": make_evidence(), "mlx": make_evidence()})
    assert (comparison.greedy_equal, comparison.disputed, misses) == (3, None, [])
    assert {difference.largest for difference in comparison.planes} == {0.0}


def test_errors_are_in_units_of_the_reference() -> None:
    """An error of 1 at a value of rms size 2 is a half, at 8, above the rms, an eighth. A row of one alone: out."""
    twos = np.array([[99.0], [2.0], [-2.0]])
    assert Difference.between(np.array([[2.0], [-3.0]]), twos[1:]) == Difference(0.5, 0.25)
    assert Difference.between(np.array([[2.0], [-3.0]]), twos) == Difference(0.5, 0.25)
    large = np.array([[8.0], [2.0], [2.0], [0.0]])
    assert Difference.between(large + np.eye(4, 1), large).largest == 0.125


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("value", [1e-2, np.nan, np.inf])
def test_one_wrong_number_in_one_plane_is_found(kind: int, value: float) -> None:
    reference = make_evidence()
    wrong = [[plane.copy() for plane in pair] for pair in reference.planes]
    wrong[1][kind][8, 1, 3] += value
    _, misses = compare({"torch": replace(reference, planes=tuple(map(tuple, wrong))), "mlx": reference})
    assert len(misses) == 1
    assert misses[0].startswith("torch / mlx: planes of layer 1 are ")


def test_wrong_logits_are_found() -> None:
    reference = make_evidence()
    logits = reference.logits.copy()
    logits[3, 7] += 0.01
    _, misses = compare({"mlx": replace(reference, logits=logits), "transformers": reference})
    assert [miss.partition(" are ")[0] for miss in misses] == ["mlx / transformers: logits"]


@pytest.mark.parametrize(("lead", "disputed"), [(0.4, 1), (1e-4, None)])
def test_greedy_tokens_may_differ_only_where_two_were_level(lead: float, disputed: int | None) -> None:
    reference = make_evidence(greedy=Greedy((1, 2, 3), (0.5, lead, 0.3)))
    (comparison,), misses = compare(
        {"torch": make_evidence(greedy=Greedy((1, 9, 3), (0.5, 0.4, 0.3))), "mlx": reference}
    )
    assert (comparison.greedy_equal, comparison.disputed) == (1, disputed)
    assert len(misses) == (disputed is not None)


def test_a_layer_that_one_side_lacks_is_no_agreement() -> None:
    empty = make_evidence(planes=((np.zeros((0, 2, 4)), np.zeros((0, 2, 4))),) * 3)
    _, misses = compare({"torch": empty, "mlx": make_evidence()})
    assert "planes of layer 0 are nan apart" in misses[0]


def test_of_a_sliding_layer_the_last_positions_are_compared() -> None:
    reference = make_evidence()
    short = tuple((k[-4:], v[-4:]) for k, v in reference.planes)
    assert compare({"torch": reference, "mlx": replace(reference, planes=short)})[1] == []
    shifted = tuple((k[:4], v[:4]) for k, v in reference.planes)
    assert compare({"torch": reference, "mlx": replace(reference, planes=shifted)})[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "muse_glimmer"])
def test_both_decoders_agree(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_oracles: None) -> None:
    """Past a window of 24, in chunks of 48."""
    write_tiny(family, tmp_path / family, layers=8, window=24)
    assert main(["model", "verify", str(tmp_path / family), "--tokens", "110", "--greedy", "12"]) == 0
    out = capsys.readouterr()
    assert "torch / mlx" in out.out
    assert "greedy equal" in out.out
    assert "12 of 12" in out.out
    assert "no reference implementation takes part" in out.err


@pytest.mark.slow
@pytest.mark.parametrize(("family", "oracle"), [("gemma3", "transformers"), ("mistral", "mlx-lm")])
def test_both_decoders_agree_with_the_reference(
    family: str, oracle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command with its usual number of greedy tokens. `tests/nodes/test_references.py` has every family."""
    write_tiny(family, tmp_path / family, layers=6, window=24)
    assert main(["model", "verify", str(tmp_path / family), "--oracle", oracle, "--tokens", "110"]) == 0
    assert capsys.readouterr().out.count("120 of 120") == 2


@pytest.mark.slow
def test_a_quantised_gguf_file_is_given_to_the_reference_as_our_weights(tmp_path: Path) -> None:
    write_tiny("muse_glimmer", tmp_path / "folder", layers=8, window=24)
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, tmp_path / "folder", encoding="Q8_0")
    arguments = ["--oracle", "transformers", "--tokens", "110", "--greedy", "20"]
    assert main(["model", "verify", str(file), *arguments]) == 0


def test_a_reference_that_is_asked_for_and_absent_is_named(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], no_oracles: None
) -> None:
    assert main(["model", "verify", str(tiny_llama), "--oracle", "mlx-lm"]) == 2
    assert "mlx-lm is not installed" in capsys.readouterr().err


def test_one_contestant_alone_proves_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, no_oracles: None
) -> None:
    monkeypatch.setattr(
        verify, "DECODERS", (verify.DECODERS[0], replace(verify.DECODERS[1], library="no_such_library"))
    )
    assert main(["model", "verify", str(tiny_llama)]) == 2


def test_a_contestant_that_fails_shows_its_last_words(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(verify.DECODERS[1], module="muser_decode.no_such_module")
    monkeypatch.setattr(verify, "DECODERS", (broken, verify.DECODERS[0]))
    assert main(["model", "verify", str(tiny_llama), "--oracle", "none", "--tokens", "20", "--greedy", "1"]) == 2
    assert "mlx failed:\n" in capsys.readouterr().err


def test_a_reference_that_is_known_to_deviate_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    mlx_lm, transformers = verify.ORACLES["mlx-lm"], verify.ORACLES["transformers"]
    spec = open_checkpoint(tiny_llama).spec
    scaled = replace(spec, embedding_scale=float(np.float32(640**0.5)))
    with pytest.raises(VerificationError, match="mlx-lm"):
        verify.check_faithful(mlx_lm, scaled)
    verify.check_faithful(transformers, scaled)
    verify.check_faithful(mlx_lm, replace(spec, embedding_scale=8.0))


def test_the_prompt_is_as_long_as_asked_for(tiny_llama: Path) -> None:
    assert len(verify._job(tiny_llama, Namespace(tokens=700, greedy=1)).token_ids) == 700
    assert verify._job(tiny_llama, Namespace(tokens=2, greedy=1)).logits_from == 1
