from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muser_wire.cli.nodes import Node, NodeFailed, PairOptions, describe_exit, running_pair, termination_as_interrupt
from muser_wire.numerics import Lane

FaultPicker = Callable[[str], None]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not (stat := Path(f"/proc/{pid}/stat")).exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def ignore(node: Node) -> None:
    """Take a node that has started, and do nothing."""


def options(folder: Path, timeout_s: float = 30.0) -> PairOptions:
    return PairOptions(Path("model.gguf"), folder, start_timeout_s=timeout_s)


def test_both_start_and_both_are_gone_afterwards(fake_nodes: FaultPicker, tmp_path: Path) -> None:
    with running_pair(options(tmp_path)) as pair:
        pair.start(ignore)
        pids = [node.process.pid for node in pair.nodes]
        assert [node.name for node in pair.nodes] == ["prefill", "decode"]
        assert pair.prefill.ports["pid"] == pids[0]
        assert pair.decode.ports["port"] > 0
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("lane", "types"), [(Lane.NATIVE, "--lane native --dtype f32 --kv f16 "), (Lane.REFERENCE, "--lane reference ")]
)
def test_both_nodes_get_the_lane_and_only_the_native_one_types(
    lane: Lane, types: str, fake_nodes: FaultPicker, tmp_path: Path
) -> None:
    with running_pair(PairOptions(Path("m.gguf"), tmp_path, lane=lane, threads=3)) as pair:
        pair.start(ignore)
        for node in pair.nodes:
            assert f" {types}--threads 3 " in " ".join(map(str, node.process.args)) + " "


def test_stop_returns_the_exit_codes_consumer_first(fake_nodes: FaultPicker, tmp_path: Path) -> None:
    fake_nodes("prefill-stops-badly")
    with running_pair(options(tmp_path)) as pair:
        pair.start(ignore)
        assert pair.stop() == [0, 3]
        assert pair.stop() == []


def test_an_error_in_the_block_stops_both(fake_nodes: FaultPicker, tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with running_pair(options(tmp_path)) as pair:
            pair.start(lambda node: pids.append(node.process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_node_that_starts_as_its_owner_is_ended_is_stopped(
    fake_nodes: FaultPicker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Started, and not known to its owner yet."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pids.append(self.pid)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        start_and_leave(tmp_path, 30.0, [])
    assert len(pids) == 1
    assert not alive(pids[0])


def start_and_leave(folder: Path, timeout_s: float, pids: list[int]) -> None:
    with running_pair(options(folder, timeout_s)) as pair:
        pair.start(lambda node: pids.append(node.process.pid))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_ends_is_named_with_the_end_of_its_log(role: str, fake_nodes: FaultPicker, tmp_path: Path) -> None:
    fake_nodes(f"{role}-ends")
    pids: list[int] = []
    with pytest.raises(NodeFailed, match=f"^the {role} node ended with exit code 7$") as caught:
        start_and_leave(tmp_path, 30.0, pids)
    assert caught.value.node == role
    assert caught.value.log.splitlines() == [f"line {number}" for number in range(60, 100)]
    assert pids
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_never_ready_is_given_up(role: str, fake_nodes: FaultPicker, tmp_path: Path) -> None:
    fake_nodes(f"{role}-never-ready")
    pids: list[int] = []
    with pytest.raises(NodeFailed, match=rf"^the {role} node was not ready within 1\.5 s$"):
        start_and_leave(tmp_path, 1.5, pids)
    assert pids
    assert not any(alive(pid) for pid in pids)


def test_a_killed_node_is_gone_at_once_and_described(fake_nodes: FaultPicker, tmp_path: Path) -> None:
    with running_pair(options(tmp_path)) as pair:
        pair.start(ignore)
        pair.prefill.kill()
        assert not alive(pair.prefill.process.pid)
        with pytest.raises(NodeFailed, match="the prefill node was ended by SIGKILL"):
            pair.prefill.check_alive()
        assert pair.stop() == [0]


OWNER = """
import signal, sys
from pathlib import Path
from muser_wire.cli.nodes import PairOptions, running_pair
with running_pair(PairOptions(Path("m"), Path(sys.argv[1]))) as pair:
    pair.start(lambda node: None)
    print(*(node.process.pid for node in pair.nodes), flush=True)
    signal.pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
def test_nodes_die_with_a_killed_owner(fake_nodes: FaultPicker, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    with owner.stdout:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        owner.kill()
        owner.wait()
    assert all(gone_within(pid, 5) for pid in pids)


def test_a_termination_unwinds_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), termination_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_exits_are_described() -> None:
    assert describe_exit(-15) == "was ended by SIGTERM"
    assert describe_exit(0) == "ended with exit code 0"
