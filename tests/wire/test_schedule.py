from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muser_wire.errors import GeometryError
from muser_wire.geometry import ElementType, Geometry
from muser_wire.schedule import (
    SEGMENT_TARGET_NBYTES,
    Schedule,
    ScheduleRequest,
    WindowPolicy,
    build_schedule,
)

MUSE_GLIMMER = Geometry(
    windows=tuple(None if layer % 4 == 3 else 2048 for layer in range(52)),
    kv_heads=2,
    head_dim=128,
    element=ElementType.F16,
)
SMOLLM2 = Geometry(windows=(None,) * 30, kv_heads=3, head_dim=64, element=ElementType.F16)


def schedule_of(
    geometry: Geometry, prompt: int, held: int = 0, chunk: int = 2048, policy: WindowPolicy = WindowPolicy.FINAL
) -> Schedule:
    return build_schedule(ScheduleRequest(geometry, prompt, held, chunk, policy))


@pytest.mark.parametrize(
    ("prompt", "held", "nbytes"),
    [(130_815, 0, 1_823_184_896), (65_536, 0, 954_190_848), (65_536, 32_768, 517_983_232)],
)
def test_muse_glimmers_payloads_have_their_published_sizes(prompt: int, held: int, nbytes: int) -> None:
    assert schedule_of(MUSE_GLIMMER, prompt, held).payload_nbytes == nbytes


def test_rolling_windows_send_every_token_of_sliding_layers_when_a_chunk_fits_the_window() -> None:
    schedule = schedule_of(MUSE_GLIMMER, 10_001, policy=WindowPolicy.ROLLING)
    assert schedule.payload_nbytes == 52 * 1024 * 10_000


def test_rolling_windows_send_only_the_window_of_a_larger_chunk() -> None:
    geometry = Geometry(windows=(4, None), kv_heads=1, head_dim=2, element=ElementType.F16)
    schedule = schedule_of(geometry, 17, chunk=8, policy=WindowPolicy.ROLLING)
    sent = [(s.layer, s.start, s.stop) for segment in schedule.segments for s in segment.slices]
    assert sent == [(0, 4, 8), (1, 0, 8), (0, 12, 16), (1, 8, 16)]


def test_a_layer_of_2_mib_is_cut_along_tokens_and_small_layers_travel_together() -> None:
    cut = schedule_of(MUSE_GLIMMER, 2049)
    assert {segment.nbytes for segment in cut.segments} == {SEGMENT_TARGET_NBYTES}
    assert [(s.start, s.stop) for s in cut.segments[0].slices] == [(0, 1024)]
    joined = schedule_of(SMOLLM2, 257)
    assert [[s.layer for s in segment.slices] for segment in joined.segments[:2]] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_last_prompt_token_is_held_back() -> None:
    assert schedule_of(SMOLLM2, 300).chunks[-1].stop == 299


def test_a_chunk_begins_inside_its_cell_when_tokens_are_held() -> None:
    chunks = schedule_of(SMOLLM2, 5000, held=2500).chunks
    assert [(c.index, c.start, c.stop) for c in chunks] == [(1, 2500, 4096), (2, 4096, 4999)]


@pytest.mark.parametrize(
    ("prompt", "held", "chunk"), [(1, 0, 8), (1 << 21, 0, 8), (10, 9, 8), (10, -1, 8), (10, 0, 0), (10, 0, 1 << 20)]
)
def test_schedules_that_cannot_exist_are_refused(prompt: int, held: int, chunk: int) -> None:
    with pytest.raises(GeometryError):
        schedule_of(SMOLLM2, prompt, held, chunk)


def test_the_digest_changes_with_each_input() -> None:
    base = ScheduleRequest(SMOLLM2, 600, 0, 256, WindowPolicy.FINAL)
    others = [
        ScheduleRequest(Geometry(SMOLLM2.windows, 3, 64, ElementType.BF16), 600, 0, 256, WindowPolicy.FINAL),
        ScheduleRequest(SMOLLM2, 601, 0, 256, WindowPolicy.FINAL),
        ScheduleRequest(SMOLLM2, 600, 1, 256, WindowPolicy.FINAL),
        ScheduleRequest(SMOLLM2, 600, 0, 255, WindowPolicy.FINAL),
        ScheduleRequest(SMOLLM2, 600, 0, 256, WindowPolicy.ROLLING),
    ]
    digests = {build_schedule(request).digest for request in [base, *others]}
    assert len(digests) == 6
    assert build_schedule(base).digest == build_schedule(base).digest


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=6),
    head_dim=st.sampled_from([2, 64, 4096]),
    prompt=st.integers(2, 300),
    data=st.data(),
    chunk=st.integers(1, 70),
    policy=st.sampled_from(WindowPolicy),
)
def test_every_token_that_a_decoder_needs_travels_exactly_once(
    windows: list[int | None], head_dim: int, prompt: int, data: st.DataObject, chunk: int, policy: WindowPolicy
) -> None:
    held = data.draw(st.integers(0, prompt - 2))
    geometry = Geometry(tuple(windows), 1, head_dim, ElementType.F16)
    schedule = schedule_of(geometry, prompt, held, chunk, policy)
    end = prompt - 1
    for layer, window in enumerate(windows):
        sent = [
            token
            for segment in schedule.segments
            for piece in segment.slices
            if piece.layer == layer
            for token in range(piece.start, piece.stop)
        ]
        assert sent == sorted(set(sent))
        needed = set(range(held, end)) if window is None else set(range(max(held, end - window), end))
        assert needed <= set(sent) <= set(range(held, end))
    for segment in schedule.segments:
        assert segment.nbytes <= SEGMENT_TARGET_NBYTES or len(segment.slices) == 1
        assert [s.layer for s in segment.slices] == sorted(s.layer for s in segment.slices)
        offset = 0
        for piece in segment.slices:
            assert piece.offset == offset
            offset += piece.nbytes
