from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from muser_wire.verification import Evidence, Greedy, VerifyJob, contestant

JOB = VerifyJob(Path("/models/a b"), (5, 6, 7, 8, 9, 10, 11), logits_from=5, chunk_tokens=2, greedy_tokens=3)


def make_evidence() -> Evidence:
    rng = np.random.default_rng(0)
    planes = tuple(
        (rng.normal(size=(7, 2, 4)).astype(np.float32), rng.normal(size=(n, 2, 4)).astype(np.float32))
        for n in range(12)
    )
    return Evidence(planes, rng.normal(size=(2, 9)).astype(np.float32), Greedy((1, 2, 3), (0.5, 0.25, 0.125)))


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    assert VerifyJob.read(tmp_path / "job.json") == JOB


def test_chunks_end_where_logits_begin() -> None:
    assert JOB.chunks() == [(5, 6), (7, 8), (9,)]


def test_evidence_survives_its_file_in_layer_order(tmp_path: Path) -> None:
    """Twelve layers: by name, 10 would come before 2."""
    evidence = make_evidence()
    evidence.write(tmp_path / "out.npz")
    got = Evidence.read(tmp_path / "out.npz")
    assert [len(v) for _, v in got.planes] == list(range(12))
    for ours, theirs in zip(evidence.planes, got.planes, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert np.array_equal(got.logits, evidence.logits)
    assert got.greedy == evidence.greedy


def test_greedy_takes_the_best_each_time_and_keeps_its_lead() -> None:
    rows = {1: [0.0, 0.0, 3.0, 1.0], 2: [5.0, 0.0, 4.5, 0.0]}
    asked = []

    def step(token: int) -> np.ndarray:
        asked.append(token)
        return np.array(rows[token], dtype=np.float32)

    greedy = Greedy.choose(np.array([0.0, 2.0, 1.0, 1.75], dtype=np.float32), step, 3)
    assert greedy == Greedy((1, 2, 0), (0.25, 2.0, 0.5))
    assert asked == [1, 2], "nobody reads the logits after the last token"


def test_a_contestant_reads_its_job_and_writes_its_evidence(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    seen = []

    def compute(job: VerifyJob) -> Evidence:
        seen.append(job)
        return make_evidence()

    assert contestant([str(tmp_path / "job.json"), str(tmp_path / "out.npz")], compute) == 0
    assert seen == [JOB]
    assert len(Evidence.read(tmp_path / "out.npz").planes) == 12


def test_pickled_evidence_is_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "out.npz", k0=np.array([{}], dtype=object), v0=np.zeros(1), logits=np.zeros(1))
    with pytest.raises(ValueError, match="allow_pickle"):
        Evidence.read(tmp_path / "out.npz")
