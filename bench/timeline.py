"""Spans of both nodes as a picture: one row for each kind of work, time to the right. Plain SVG, no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

ROWS = ("compute", "copy", "wire", "verify", "commit")
COLOURS = {"compute": "#4c78a8", "copy": "#72b7b2", "wire": "#e0932f", "verify": "#54a24b", "commit": "#b279a2"}
WIDTH = 960
LABEL_WIDTH = 80
ROW_HEIGHT = 28
BAR_HEIGHT = 18
TOP = 40
TICKS = 8
STEPS = (1, 2, 5)
FONT = 'font-family="sans-serif" font-size="12"'

Span = Mapping[str, int | str]
"""As `muser_wire.trace` writes them: kind, index, start_ns, stop_ns."""


def timeline(spans: Sequence[Span], title: str) -> str:
    """Return an SVG document. Spans of other kinds than `ROWS` are left out; time 0 is the first span's start."""
    shown = [span for span in spans if span["kind"] in ROWS]
    start_ns = min(int(span["start_ns"]) for span in shown)
    length_ns = max(int(span["stop_ns"]) for span in shown) - start_ns
    scale = (WIDTH - LABEL_WIDTH - 20) / max(1, length_ns)
    bottom = TOP + ROW_HEIGHT * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 30}" {FONT}>',
        f'<rect width="{WIDTH}" height="{bottom + 30}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for number, kind in enumerate(ROWS):
        parts.append(f'<text x="10" y="{TOP + number * ROW_HEIGHT + 14}">{kind}</text>')
    parts += [_tick(ms, LABEL_WIDTH + ms * 1e6 * scale, bottom) for ms in ticks_ms(length_ns / 1e6)]
    parts += [_bar(span, start_ns, scale) for span in shown]
    return "\n".join([*parts, "</svg>", ""])


def ticks_ms(length_ms: float) -> list[float]:
    """Return round times from 0 to `length_ms`, at most a few more than TICKS of them.

    >>> ticks_ms(41.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    step = 1e-3
    while True:
        for factor in STEPS:
            if length_ms / (step * factor) <= TICKS:
                return [round(n * step * factor, 6) for n in range(int(length_ms / (step * factor)) + 1)]
        step *= 10


def _tick(ms: float, x: float, bottom: int) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{ms:g} ms</text>'
    )


def _bar(span: Span, start_ns: int, scale: float) -> str:
    kind = str(span["kind"])
    x = LABEL_WIDTH + (int(span["start_ns"]) - start_ns) * scale
    # A thin bar would vanish; half a pixel of gap tells neighbours apart.
    width = max(0.8, (int(span["stop_ns"]) - int(span["start_ns"])) * scale - 0.5)
    y = TOP + ROWS.index(kind) * ROW_HEIGHT
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{COLOURS[kind]}"/>'
