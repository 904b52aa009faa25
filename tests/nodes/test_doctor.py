"""`muser doctor` on a decode node beside a real producer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from muser_wire.cli.__main__ import main
from muser_wire.transport.grpc import GrpcServer

from .conftest import Producer, start_producer

GRID = 64


@pytest.fixture
def producer(tiny_llama: Path) -> Iterator[int]:
    server = GrpcServer("127.0.0.1", 0, 0)
    made: Producer = start_producer(tiny_llama, GRID)
    facts = made.service._facts
    made.service._facts = dataclasses.replace(facts, data_port=server.data_port)
    server.start(made.service)
    yield server.control_port
    server.stop(0)
    made.scheduler.stop(5.0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [GRID, 2 * GRID])
def test_identities_are_compared_one_by_one_and_the_link_is_measured(
    chunk_tokens: int,
    producer: int,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MUSER_HOME", str(tmp_path))
    (tmp_path / "decode.toml").write_text(
        f'[model]\nmodel = "{tiny_llama}"\nkv = "f16"\n[network]\nport = 0\nproducer = ["127.0.0.1:{producer}"]\n'
        f"[sizes]\nchunk_tokens = {chunk_tokens}\n"
    )
    status = main(["doctor", "--node", "decode", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    name = f"producer 127.0.0.1:{producer}"
    assert rows[name]["verdict"] == rows[f"{name}: weights_digest"]["verdict"] == "ok"
    assert rows["link 127.0.0.1: throughput"]["bytes_per_s"] > 1e6
    wrong = [row for row, told in rows.items() if told["verdict"] == "bad"]
    assert wrong == ([] if chunk_tokens == GRID else [f"{name}: chunk_tokens"])
    assert status == bool(wrong)
