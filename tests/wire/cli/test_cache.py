from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from kvpack_support import FULL, Shelf

from muser_wire.cli.__main__ import main
from muser_wire.kvpack import index
from muser_wire.kvpack.disk import FORMAT_DIRECTORY, locked, store_files

IDS = list(range(60, 80))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache directory with a request of three blocks."""
    shelf = Shelf(tmp_path / FORMAT_DIRECTORY, FULL, 0, 1 << 20)
    shelf.keep(IDS, decoded_from=17)
    shelf.describe()
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
    monkeypatch.setattr(index, "MIN_HELD_TOKENS", 1)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([*IDS[:11], 1, 2])))
    assert main(["cache", "explain", "--dir", str(directory)]) == 0
    first, *blocks = capsys.readouterr().out.splitlines()
    assert first.endswith("lane native, grid 8, : 11 of 12 tokens held")
    assert blocks == ["  tokens 0-8: 8 held, hit in disk", "  tokens 8-12: 3 held, hit in disk: differs at token 11"]
    (directory / "ids.json").write_text(json.dumps(IDS))
    (directory / "kvpack-0").mkdir()
    assert main(["cache", "explain", "--json", "--ids", str(directory / "ids.json"), "--dir", str(directory)]) == 0
    answer = json.loads(capsys.readouterr().out)
    (state,) = answer["states"]
    assert (state["held_tokens"], state["reason"], state["lane"]) == (19, "all held", "native")
    assert [(block["held"], block["decoded"]) for block in state["blocks"]] == [(8, False), (8, False), (3, True)]
    assert answer["ignored_stores"] == ["kvpack-0"]


def test_explain_reads_text_of_a_model(directory: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "text").write_text("hello there")
    command = ["cache", "explain", "--ids", str(directory / "text"), "--model", str(tiny_llama)]
    assert main([*command, "--dir", str(directory)]) == 0
    assert "differs at token 0" in capsys.readouterr().out


class Node(BaseHTTPRequestHandler):
    """Answers as a node does; what it was asked is kept."""

    asked: ClassVar[list[object]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        block = {"start": 0, "stop": 8, "held": 8, "where": "memory", "decoded": True, "reason": ""}
        miss = {"start": 8, "stop": 9, "held": 0, "where": "", "decoded": False, "reason": "evicted for newer blocks"}
        other = {"held_tokens": 5, "differs": ["lane"], "lane": "reference"}
        answer = {"prompt_tokens": 10, "held_tokens": 8, "reason": "evicted for newer blocks", "blocks": [block, miss]}
        data = json.dumps({**answer, "elsewhere": [other], "ignored_stores": ["kvpack-0"]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def node() -> Iterator[int]:
    """The port of a node that explains."""
    with HTTPServer(("127.0.0.1", 0), Node) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_explain_asks_the_node_about_a_request(
    node: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Node.asked.clear()
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    (tmp_path / "body.json").write_text(json.dumps(body))
    command = ["cache", "explain", "--port", str(node), "--request"]
    assert main([*command, str(tmp_path / "body.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "8 of 10 prompt tokens held: evicted for newer blocks",
        "  tokens 0-8: 8 held, hit in memory, in part decoded",
        "  tokens 8-9: 0 held, miss: evicted for newer blocks",
        "  5 tokens are held of another state on disk, which differs in lane (reference)",
        "  kvpack-0 beside it was made by another version, and is ignored",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2, 3]"))
    assert main([*command, "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_tokens"] == 8
    assert Node.asked == [("/explain-cache", body), ("/explain-cache", {"tokens": [1, 2, 3]})]
    monkeypatch.setattr("sys.stdin", io.StringIO("3"))
    assert main([*command, "-"]) == 2
    assert "expected the body of a request" in capsys.readouterr().err


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
