from __future__ import annotations

import pytest

from muser_wire.geometry import ElementType
from muser_wire.model.catalogue import catalogue_spec
from muser_wire.model.cost import (
    PlanRequest,
    active_weights,
    full_layer_token_nbytes,
    local_s,
    plan_schedule,
    remote_s,
    token_flops,
    windows_nbytes,
)
from muser_wire.schedule import Schedule, WindowPolicy

MUSE = catalogue_spec("muse-glimmer-30b")


def schedule(prompt: int, held: int = 0, policy: WindowPolicy = WindowPolicy.FINAL) -> Schedule:
    return plan_schedule(MUSE, PlanRequest(prompt, held, 2048, policy, ElementType.F16))


def test_muse_glimmer_s_weights_and_arithmetic() -> None:
    attention = 6656 * 128 * (32 + 2 + 2 + 32 + 32)
    expected = 52 * (attention + 3 * 6656 * 19968) + 202048 * 6656
    assert active_weights(MUSE) == expected == 26_508_558_336
    assert round(expected / 1e9, 1) == 26.5
    assert round(token_flops(MUSE) / 1e9) == 53


def test_muse_glimmer_s_kv() -> None:
    assert full_layer_token_nbytes(MUSE, ElementType.F16) == 13_312
    assert windows_nbytes(MUSE, ElementType.F16) == 81_788_928


@pytest.mark.parametrize(
    ("prompt", "held", "nbytes"),
    [(130_815, 0, 1_823_184_896), (65_536, 0, 954_190_848), (65_536, 32_768, 517_983_232)],
)
def test_the_published_payloads(prompt: int, held: int, nbytes: int) -> None:
    assert schedule(prompt, held).payload_nbytes == nbytes
    assert 13_312 * (prompt - 1 - held) + 39 * 1_024 * 2048 == nbytes


def test_half_the_prompt_held_leaves_the_published_share() -> None:
    assert round(100 * schedule(65_536, 32_768).payload_nbytes / schedule(65_536).payload_nbytes, 4) == 54.2851


def test_a_fast_link_hides_behind_the_prefill() -> None:
    plan = schedule(65_536)
    # 65,535 tokens at 1,000 a second; what cannot hide is the last segment, under a MiB.
    assert 65.535 < remote_s(MUSE, plan, 1000.0, 10e9) < 65.535 + 2 * (1 << 20) / 10e9


def test_a_slow_link_decides() -> None:
    plan = schedule(65_536)
    alone = plan.payload_nbytes / 1e6
    assert alone < remote_s(MUSE, plan, 1e6, 1e6) < alone + 1


def test_the_local_way_computes_what_is_not_held() -> None:
    assert local_s(schedule(65_536), 300.0) == pytest.approx(65_535 / 300)
    assert local_s(schedule(65_536, 32_768), 300.0) == pytest.approx(32_767 / 300)


def test_rolling_windows_cost_bytes_and_little_time() -> None:
    final, rolling = schedule(65_536), schedule(65_536, policy=WindowPolicy.ROLLING)
    assert rolling.payload_nbytes == 65_535 * 52 * 1024
    assert remote_s(MUSE, rolling, 1000.0, 1e9) < remote_s(MUSE, final, 1000.0, 1e9) + 0.1


def test_a_tied_head_is_read_like_any_other() -> None:
    gemma = catalogue_spec("gemma3-270m")
    layer = 640 * 256 * (4 + 1 + 1 + 4) + 3 * 640 * 2048
    assert active_weights(gemma) == 18 * layer + 262_144 * 640
