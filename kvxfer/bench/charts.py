"""Charts as SVG, for pages that need no network and no script: lines over a number, and stacked bars.

All text is escaped, all numbers are rounded to what can be seen. A series keeps its colour wherever its name appears.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PALETTE: Final = (
    "#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5", "#64473a", "#dfab01", "#868d95",
    "#9ecae1", "#f28e8e", "#7fb800", "#c5a3e0", "#1f2d7a", "#2b2b2b", "#00b3b3", "#e6d5b8",
)  # fmt: skip
"""As many as a request has stages, in both modes: two parts of one chart never look alike."""
"""Told apart by most readers, and in print by their lightness."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 300, 62, 44, 30, 26
_ROW, _NAME = 26, 190


def colours(names: Sequence[str]) -> dict[str, str]:
    """Give each name a colour, in the order of their first appearance."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(dict.fromkeys(names))}


def lines(title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw a line with its points for each series, from zero up; ``across`` and ``up`` name the axes."""
    paint = colours(list(series))
    points = [point for one in series.values() for point in one]
    if not points:
        return ""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = nice(max(y for _, y in points))
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (x - low) / (high - low) if high > low else 0.5
        return round(_LEFT + wide * share, 1), round(_TOP + tall * (1 - y / top), 1)

    parts = [_text(_LEFT, 16, title, size=13, weight="bold")]
    for tick in range(5):
        value = top * tick / 4
        _, y = at(low, value)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:,g}", anchor="end"))
    along = sorted({x for x, _ in points})
    parts += [_text(at(x, 0)[0], _HEIGHT - _BOTTOM + 16, f"{x:,g}", anchor="middle") for x in along]
    parts.append(_text(_LEFT + wide / 2, _HEIGHT - 8, across, anchor="middle"))
    parts.append(_text(6, 16, up))
    for name, one in series.items():
        places = [at(x, y) for x, y in sorted(one)]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{paint[name]}" stroke-width="2"/>')
        for (x, y), (_, value) in zip(places, sorted(one), strict=True):
            parts.append(
                f'<circle cx="{x}" cy="{y}" r="3.5" fill="{paint[name]}"><title>{escape(name)}: {value:,.1f}</title></circle>'
            )
    return _svg(title, parts, _HEIGHT) + legend(paint)


def stacked(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """Draw a bar for each row, made of its parts one after the other, and how long it is."""
    parts_of_all = [part for row in rows.values() for part in row]
    paint = colours(parts_of_all)
    longest = max((sum(row.values()) for row in rows.values()), default=0.0)
    if longest <= 0:
        return ""
    wide = _WIDTH - _NAME - 80
    drawn = [_text(6, 16, title, size=13, weight="bold")]
    for number, (name, row) in enumerate(rows.items()):
        y, x = 28 + number * _ROW, float(_NAME)
        drawn.append(_text(_NAME - 6, y + 14, name, anchor="end"))
        for part, value in row.items():
            length = wide * value / longest
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_ROW - 8}" fill="{paint[part]}">'
                f"<title>{escape(part)}: {value:,.2f} {escape(unit)}</title></rect>"
            )
            x += length
        drawn.append(_text(x + 5, y + 14, f"{sum(row.values()):,.1f} {unit}"))
    return _svg(title, drawn, 36 + len(rows) * _ROW) + legend(paint)


def legend(paint: Mapping[str, str]) -> str:
    """Name the colours."""
    keys = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in paint.items())
    return f'<p class="legend">{keys}</p>'


def nice(value: float) -> float:
    """Return the least of 1, 2, 2.5, 4, 5, 8 and 10 times a power of ten that is no less than ``value``."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "normal") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<svg role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )
