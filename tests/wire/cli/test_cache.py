from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from kvpack_support import FULL, Shelf

from muser_wire.cli.__main__ import main
from muser_wire.kvpack.disk import FORMAT_DIRECTORY, locked, store_files

IDS = list(range(60, 80))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache directory with a request of three blocks."""
    Shelf(tmp_path / FORMAT_DIRECTORY, FULL, 0, 1 << 20).keep(IDS, decoded_from=17)
    return tmp_path


def test_ls_names_each_block(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--dir", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[2] for line in lines] == ["0-8", "8-16", "16-20"]
    assert [line.endswith("decoded from 17") for line in lines] == [False, False, True]
    assert main(["cache", "ls", "--json", "--dir", str(directory)]) == 0
    assert [block["stop"] for block in json.loads(capsys.readouterr().out)["blocks"]] == [8, 16, 20]


def test_stats_sum_up(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", "--json", "--dir", str(directory)]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["states"].values()
    size = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    assert facts == {"blocks": 3, "tokens": 20, "nbytes": size, "deepest_token": 20}
    assert main(["cache", "stats", "--dir", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"in all: 3 blocks, {size:,} bytes, 0 unreadable files"


def test_verify_names_damage_and_fails(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", "--dir", str(directory)]) == 0
    assert capsys.readouterr().out == "3 blocks read, 0 damaged\n"
    victim = next(iter(directory.rglob("*.safetensors")))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert main(["cache", "verify", "--dir", str(directory)]) == 1
    assert victim.name in capsys.readouterr().out


def test_clear_deletes_blocks_unless_a_node_runs(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(store_files(directory)):
        assert main(["cache", "clear", "--dir", str(directory)]) == 2
    assert "in use by another process" in capsys.readouterr().err
    assert main(["cache", "clear", "--dir", str(directory)]) == 0
    assert capsys.readouterr().out == "3 files deleted\n"
    assert not list(directory.rglob("*.safetensors"))


def test_explain_reads_ids(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([*IDS[:11], 1, 2])))
    assert main(["cache", "explain", "--dir", str(directory)]) == 0
    assert capsys.readouterr().out.split("  ")[1] == (
        "11 of 12 tokens held in 2 blocks: the prompt differs at token 11\n"
    )
    (directory / "ids.json").write_text(json.dumps(IDS))
    assert main(["cache", "explain", "--json", "--ids", str(directory / "ids.json"), "--dir", str(directory)]) == 0
    (state,) = json.loads(capsys.readouterr().out)["states"]
    assert (state["held_tokens"], state["reason"]) == (19, "all held")


def test_explain_reads_text_of_a_model(directory: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "text").write_text("hello there")
    command = ["cache", "explain", "--ids", str(directory / "text"), "--model", str(tiny_llama)]
    assert main([*command, "--dir", str(directory)]) == 0
    assert "the prompt differs at token 0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1.5]", "[true]", "[-1]", "[4294967296]"])
def test_what_is_no_list_of_ids_is_refused(text: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "ids.json").write_text(text)
    assert main(["cache", "explain", "--ids", str(directory / "ids.json"), "--dir", str(directory)]) == 2
    assert "ids.json" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text("[1, 2]")
    for action in (["ls"], ["stats"], ["verify"], ["clear"], ["explain", "--ids", str(tmp_path / "ids.json")]):
        assert main(["cache", *action, "--dir", str(tmp_path / "none")]) == 0
    assert "no blocks are kept here" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
