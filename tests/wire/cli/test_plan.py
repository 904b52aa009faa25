from __future__ import annotations

import json
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_muse_glimmer_from_its_description_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    found = plan(capsys, "--model", "muse-glimmer-30b")
    assert round(float(str(found["active_weights"])) / 1e9, 1) == 26.5
    assert round(float(str(found["token_flops"])) / 1e9) == 53
    assert found["full_layer_token_nbytes"] == 13_312
    assert found["windows_nbytes"] == 81_788_928
    assert "payload_nbytes" not in found


@pytest.mark.parametrize(
    ("arguments", "nbytes"),
    [
        (("--prompt", "130815"), 1_823_184_896),
        (("--prompt", "65536"), 954_190_848),
        (("--prompt", "65536", "--held", "32768"), 517_983_232),
    ],
)
def test_payloads(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], nbytes: int) -> None:
    found = plan(capsys, "--model", "muse-glimmer-30b", "--windows", "final", *arguments)
    assert found["payload_nbytes"] == nbytes


def test_by_default_windows_are_counted_as_nodes_send_them(capsys: pytest.CaptureFixture[str]) -> None:
    # Chunks no larger than the window: every token of every one of the 52 layers, 1,024 bytes each.
    assert plan(capsys, "--model", "muse-glimmer-30b", "--prompt", "65536")["payload_nbytes"] == 65_535 * 52 * 1024


def test_times_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "65536", "--prefill-rate", "1500", "--local-rate", "300", "--link", "1.0"]
    assert main(["plan", "--model", "muse-glimmer-30b", *arguments]) == 0
    out = capsys.readouterr().out
    assert "3,489,607,680 bytes" in out
    assert "link alone             3.490 s" in out
    # 65,535 tokens at 1,500 and at 300 a second.
    assert "first token, remote    43.69" in out
    assert "first token, local     218.450 s" in out
    assert "5.00 times as fast" in out


def test_a_checkpoint_can_be_planned(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--model", str(tiny_llama), "--prompt", "101", "--local-rate", "10")
    assert found["payload_nbytes"] == 100 * 6 * 2 * 2 * 16 * 2
    assert found["local_s"] == pytest.approx(10.0)
    assert found["windows_nbytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "nothing"], r"nothing is neither a path"),
        (["--model", "muse-glimmer"], "muse-glimmer is neither"),
        (["--model", "muse-glimmer-30b", "--local-rate", "5"], "a time needs --prompt"),
        (["--model", "muse-glimmer-30b", "--prompt", "9", "--prefill-rate", "0"], "--prefill-rate is 0"),
        (["--model", "muse-glimmer-30b", "--prompt", "9", "--link", "nan"], "--link is nan"),
        (["--model", "muse-glimmer-30b", "--prompt", "1"], "a handoff needs 2 to"),
    ],
)
def test_numbers_that_make_no_plan(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"muser: {problem}")
