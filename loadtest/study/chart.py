"""A row of line charts as one SVG, with the few marks that these need. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 300, 220
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 30, 12, 40


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    ys: tuple[float, ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over the same places, which are spread evenly and named by `ticks`; y starts at zero."""

    title: str
    x_label: str
    ticks: tuple[str, ...]
    curves: tuple[Curve, ...]
    highest: float = 1.0


def draw_panels(panels: Sequence[Panel]) -> str:
    """One SVG with a common legend under the panels. All panels have curves of the same names."""
    placed = [
        f'<g transform="translate({number * _WIDTH},0)">{_panel(panel)}</g>' for number, panel in enumerate(panels)
    ]
    legend = _legend(panels[0].curves, _HEIGHT + 16)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(panels) * _WIDTH} {_HEIGHT + 34}" '
        f'font-family="sans-serif" font-size="11" fill="#222">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(placed)}{legend}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(panel.title)}</text>']
    for step in range(5):
        value = panel.highest * step / 4
        y = _y(panel, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for place, tick in enumerate(panel.ticks):
        parts.append(f'<text x="{_x(panel, place):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{escape(tick)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.extend(_curve(panel, curve) for curve in panel.curves)
    return "".join(parts)


def _curve(panel: Panel, curve: Curve) -> str:
    points = " ".join(f"{_x(panel, place):.1f},{_y(panel, y):.1f}" for place, y in enumerate(curve.ys))
    return f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="2"{_dash(curve)}/>'


def _legend(curves: Sequence[Curve], y: int) -> str:
    parts, x = [], _LEFT
    for curve in curves:
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{curve.colour}" stroke-width="2"{_dash(curve)}/>')
        parts.append(f'<text x="{x + 27}" y="{y}">{escape(curve.name)}</text>')
        x += 50 + 6 * len(curve.name)
    return "".join(parts)


def _dash(curve: Curve) -> str:
    return ' stroke-dasharray="5 4"' if curve.dashed else ""


def _x(panel: Panel, place: int) -> float:
    inner = _WIDTH - _LEFT - _RIGHT - 24
    return _LEFT + 12 + inner * place / max(1, len(panel.ticks) - 1)


def _y(panel: Panel, value: float) -> float:
    inner = _HEIGHT - _TOP - _BOTTOM
    return _HEIGHT - _BOTTOM - inner * min(1.0, max(0.0, value / panel.highest))
