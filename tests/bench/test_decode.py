from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import decode

MOST_FOR_MUSE_GLIMMER = 900


def counted(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> tuple[int, dict[str, int]]:
    """What the command prints: the total, and the number of each kind."""
    assert decode.main(["--count", model, "--venv", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    total = re.search(rf"^{decode.OURS} +(\d+)$", out, re.MULTILINE)
    kinds = re.search(rf"^{decode.OURS}: (.*)$", out, re.MULTILINE)
    assert total
    assert kinds
    return int(total[1]), {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", kinds[1])}


def test_a_token_of_muse_glimmer_takes_at_most_900_operations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    total, kinds = counted(capsys, tmp_path, "muse-glimmer")
    assert total == sum(kinds.values()) <= MOST_FOR_MUSE_GLIMMER
    # Four projections a layer and the head; one update of the cache; norms, positions and attention beside them.
    assert (kinds["Matmul"], kinds["SliceUpdate"]) == (4 * 52 + 1, 52)
    assert kinds["Fast"] == 5 * 52 + 2 + (52 - 13) + 52


def test_an_operation_more_than_allowed_is_a_missed_goal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode.MOST_OPERATIONS, "gemma3-270m", 5)
    assert decode.main(["--count", "gemma3-270m", "--venv", str(tmp_path)]) == 1
    assert "MISSED operations a token, 5 allowed over" in capsys.readouterr().out


def test_a_token_of_gemma_takes_as_many_as_its_layers_need(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, kinds = counted(capsys, tmp_path, "gemma3-270m")
    assert (kinds["Matmul"], kinds["SliceUpdate"], kinds["Compiled"]) == (4 * 18 + 1, 18, 2 * 18)
