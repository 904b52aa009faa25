from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.driver import PEERS_DIR, BenchError, Peer, Samples, compiling, interleave, machine, table, write_result

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(PEERS_DIR)!r})
from lines import serve
count = 0

def tick(step):
    global count
    count += step
    print("noise of a library")
    os.system("echo noise of another")
    return {{"count": count, "threads": os.environ["OMP_NUM_THREADS"]}}

def fail():
    raise ValueError("this peer is broken")

serve({{"tick": tick, "fail": fail}})
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT)
    started = Peer("other", str(script), Path(sys.executable), threads=3)
    yield started
    started.close()


def test_a_peer_keeps_its_state_and_its_noise_does_not_reach_us(peer: Peer) -> None:
    assert peer.call("tick", step=2) == {"count": 2, "threads": "3"}
    assert peer.call("tick", step=5)["count"] == 7


def test_a_peer_that_fails_says_why(peer: Peer) -> None:
    with pytest.raises(BenchError, match=r"other ended with status 1 in fail(?s:.*)this peer is broken"):
        peer.call("fail")
    with pytest.raises(BenchError, match="other ended"):
        peer.call("tick", step=1)


class Counted:
    """Stands for a peer."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_rounds_interleave_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def call(peer: Counted) -> float:
        calls.append(peer.name)
        return float(len(calls))

    samples = interleave([Counted("a"), Counted("b")], 2, call)
    assert calls == ["a", "b"] * 3
    assert samples.by_name == {"a": (3.0, 5.0), "b": (4.0, 6.0)}


def test_a_ratio_is_formed_inside_each_round() -> None:
    """The machine was ten times slower in the last round: the ratio of the medians would be 3.5."""
    samples = Samples({"ours": (1.0, 2.0, 20.0), "theirs": (2.0, 7.0, 40.0)})
    assert samples.ratio("theirs", "ours") == 2.0
    assert samples.median("theirs") == 7.0
    assert samples.least("ours") == 1.0


@pytest.mark.parametrize(("given", "kept"), [({}, ""), ({"CXXFLAGS": "-O2"}, "-O2 ")])
def test_peers_are_compiled_without_dead_stores_where_there_is_amx(given: dict[str, str], kept: str) -> None:
    assert compiling(given, "fpu amx_tile avx2") == {"CXXFLAGS": f"{kept}-fno-tree-dse -fno-dse"}
    assert compiling(given, "fpu avx2") == given


def test_a_table_lines_up() -> None:
    assert table(["who", "tok/s"], [["a", "7"], ["longer", "1234567"]]).splitlines() == [
        "who       tok/s",
        "------  -------",
        "a             7",
        "longer  1234567",
    ]


def test_the_result_file_holds_machine_command_and_samples(tmp_path: Path) -> None:
    out = tmp_path / "results" / "run.json"
    write_result(out, machine(), samples={128: Samples({"a": (1.5,)})})
    record = json.loads(out.read_text())
    assert record["samples"] == {"128": {"a": [1.5]}}
    assert record["command"] == sys.argv
    assert {"processor", "cores", "system", "load_before"} <= set(record["machine"])
