from __future__ import annotations

import pytest

from bench.overlap import SEGMENT_NBYTES, SEGMENTS, SHAPE, Case, in_flight
from bench.synthetic import Shape
from muser_wire.schedule import ScheduleRequest, WindowPolicy, build_schedule


def test_each_layer_of_the_measured_model_is_one_segment() -> None:
    shape = Shape(**SHAPE)
    schedule = build_schedule(
        ScheduleRequest(shape.geometry, 2 * shape.chunk_tokens + 1, 0, shape.chunk_tokens, WindowPolicy.ROLLING)
    )
    assert [len(chunk.segments) for chunk in schedule.chunks] == [SEGMENTS, SEGMENTS]
    assert {segment.nbytes for segment in schedule.segments} == {SEGMENT_NBYTES}


def test_the_prediction_is_the_slower_stage_and_one_segment_of_the_other() -> None:
    # Two chunks of 16 segments: 3.2 s of computation and 1.6 s of wire, so 0.05 s of wire after the last layer.
    slow_compute = Case("paced", "x", 2, chunk_s=1.6, wire_s=1.6, measured_s=3.25)
    assert slow_compute.predicted_s == pytest.approx(3.25)
    assert slow_compute.error == pytest.approx(0.0)
    slow_wire = Case("paced", "x", 1, chunk_s=0.16, wire_s=1.6, measured_s=1.7)
    assert slow_wire.predicted_s == pytest.approx(1.61)
    assert slow_wire.error > 0.05


def test_a_segment_is_on_the_wire_until_the_receiver_has_it() -> None:
    sent = [{"kind": "wire", "index": index, "start_ns": 10 * index, "stop_ns": 10 * index + 1} for index in range(2)]
    seen = [{"kind": "verify", "index": index, "start_ns": 10 * index + 7, "stop_ns": 99} for index in range(2)]
    assert [(span["start_ns"], span["stop_ns"]) for span in in_flight([*sent, *seen])] == [
        (0, 7),
        (10, 17),
        (7, 99),
        (17, 99),
    ]
