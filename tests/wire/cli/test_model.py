from __future__ import annotations

import json
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main
from muser_wire.model.tiny import write_tiny
from muser_wire.model.tiny_gguf import write_tiny_gguf


def test_inspect_prints_every_fact(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", str(tiny_llama)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["family"] == "llama"
    assert rows["layers"] == "6 (6 x full)"
    assert rows["heads"] == "4 for queries, 2 for keys and values, 16 wide"
    assert rows["context"] == "2048 tokens"
    assert rows["encodings"].startswith("57 x F32")
    assert rows["KV"] == "cache         768 bytes a token in f16"
    assert len(rows["spec"]) == len(rows["tokenizer"]) == 64


def test_inspect_prints_json(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", "--json", str(tiny_llama)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["layers"], found["encodings"]) == (str(tiny_llama), 6, {"F32": 57})
    assert found["kv_token_nbytes"] == 6 * 2 * 2 * 16 * 2


def test_fetch_of_a_local_path_prints_it(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", str(tiny_llama)]) == 0
    assert capsys.readouterr().out == f"{tiny_llama}\n"


def test_fetch_of_what_is_there_does_nothing_and_says_so(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = smollm2.stat().st_mtime_ns
    assert main(["model", "fetch", "smollm2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{smollm2}\n"
    assert err == f"{smollm2} is already there\n"
    assert smollm2.stat().st_mtime_ns == before


def test_path_prints_where_a_model_will_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    assert main(["model", "path", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\n"


def test_inspect_takes_a_name_and_says_when_it_was_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    assert main(["model", "inspect", "smollm2"]) == 2
    assert "does not exist; `muser model fetch smollm2` fetches" in capsys.readouterr().err


def test_an_unknown_path_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", "/nowhere/model.gguf"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("muser: /nowhere/model.gguf is neither a path that exists")
    assert err.count("\n") == 1


def test_a_truncated_file_is_one_line_on_standard_error(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with smollm2.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(3_000_000))
    assert main(["model", "inspect", str(tmp_path / "cut.gguf")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("muser: ")
    assert "token_embd.weight" in err
    assert "cut short" in err


@pytest.mark.parametrize("layers", ["6", "7", "8"])
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen3", "gemma3", "muse_glimmer"])
def test_tiny_writes_a_model_that_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, layers: str
) -> None:
    out = tmp_path / "model"
    assert main(["model", "tiny", family, str(out), "--layers", layers, "--window", "32"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["model", "inspect", "--json", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == int(layers)
    slides = {"mistral": int(layers), "gemma3": int(layers) - 1, "muse_glimmer": int(layers) - 2}.get(family, 0)
    assert found["windows"].get("32", 0) == slides
    assert found["asides"] == {}


def test_inspect_says_what_is_left_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny("muse_glimmer", tmp_path / "m", layers=6)
    write_tiny_gguf(tmp_path / "m.gguf", tmp_path / "m")
    assert main(["model", "inspect", str(tmp_path / "m.gguf")]) == 0
    out = capsys.readouterr().out
    assert "layers           6 (4 x 64, 2 x full)" in out
    assert "left aside       12 tensors: constants, read into the description" in out


def test_tiny_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert main(["model", "tiny", "llama", str(tmp_path)]) == 2
    assert "is not empty; a tiny checkpoint overwrites nothing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(("option", "problem"), [("--layers=0", "num_hidden_layers is 0"), ("--vocab=9", "not 9")])
def test_tiny_refuses_sizes_that_make_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, problem: str
) -> None:
    assert main(["model", "tiny", "llama", str(tmp_path / "x"), option]) == 2
    assert problem in capsys.readouterr().err


def test_quantize_writes_a_file_and_prints_it(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiny.gguf"
    assert main(["model", "quantize", "--to", "q4_0", str(tiny_llama), str(out)]) == 0
    printed, said = capsys.readouterr()
    assert printed == f"{out}\n"
    # 6 layers of 7 matrices; embedding and head stay finer; 13 norms.
    assert said == "42 x Q4_0, 13 x F32, 2 x Q8_0\n"
    assert main(["model", "inspect", str(out)]) == 0
    assert main(["model", "quantize", str(out), str(tmp_path / "again.gguf")]) == 2
    assert "use it as it is" in capsys.readouterr().err
