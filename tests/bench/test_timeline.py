from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.timeline import ROWS, ticks_ms, timeline

SVG = "{http://www.w3.org/2000/svg}"
SPANS = [
    {"kind": "compute", "index": 0, "start_ns": 1_000_000, "stop_ns": 3_000_000},
    {"kind": "wire", "index": 0, "start_ns": 3_000_000, "stop_ns": 5_000_000},
    {"kind": "seal", "index": 0, "start_ns": 3_000_000, "stop_ns": 3_100_000},
]


def bars(svg: str) -> list[tuple[float, float, str]]:
    """x, width and colour of every bar of a well-formed document."""
    rects = ET.fromstring(svg).findall(f"{SVG}rect")[1:]
    return [(float(r.attrib["x"]), float(r.attrib["width"]), r.attrib["fill"]) for r in rects]


def test_a_bar_lies_where_its_span_lies() -> None:
    (compute_x, compute_width, compute_colour), (wire_x, wire_width, wire_colour) = bars(timeline(SPANS, "x"))
    assert wire_x - compute_x == pytest.approx(compute_width + 0.5, abs=0.11)
    assert compute_width == pytest.approx(wire_width, abs=0.11)
    assert compute_colour != wire_colour


def test_kinds_without_a_row_are_left_out_and_titles_are_escaped() -> None:
    svg = timeline(SPANS, "a < b & c")
    assert len(bars(svg)) == 2
    texts = [text.text for text in ET.fromstring(svg).findall(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    assert list(ROWS) == texts[1:6]


@pytest.mark.parametrize(("length", "step"), [(0.9, 0.2), (8.0, 1.0), (9.0, 2.0), (41.0, 10.0), (700.0, 100.0)])
def test_ticks_are_round_and_few(length: float, step: float) -> None:
    ticks = ticks_ms(length)
    assert ticks[1] - ticks[0] == pytest.approx(step)
    assert len(ticks) <= 9
    assert length - ticks[-1] < step
