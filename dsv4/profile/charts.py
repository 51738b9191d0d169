"""Inline SVG charts for a page that works without a network."""

from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = (
    "#3b6ea5",
    "#e08a3c",
    "#5a9e5f",
    "#c4534f",
    "#7d68ad",
    "#8a6d5a",
    "#c978b0",
    "#7f7f7f",
    "#b5a642",
    "#4fa8b5",
)
_ROW, _LEFT, _WIDTH, _RIGHT = 22, 210, 620, 110


def bars(values: Mapping[str, float], unit: str, digits: int = 2) -> str:
    """Horizontal bars, one a value, in the given order."""
    most = max(values.values(), default=0) or 1
    height = _ROW * len(values) + 4
    lines = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + _RIGHT} {height}" role="img">']
    for i, (name, value) in enumerate(values.items()):
        y = i * _ROW + 2
        length = _WIDTH * value / most
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 6}" fill="{_COLOURS[i % 10]}"/>'
        )
        lines.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 14}">{value:,.{digits}f} {escape(unit)}</text>')
    return "\n".join([*lines, "</svg>"])


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A line per series, with vertical marks (x, text)."""
    width, height, left, bottom = 720, 300, 70, 40
    points = [p for line in series.values() for p in line]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) * 1.05 or 1

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (width - left - 150) * (x - x0) / ((x1 - x0) or 1), (height - bottom) * (1 - y / top) + 6

    out = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for step in range(5):
        value = top * step / 4
        _, y = at(x0, value)
        out.append(f'<line x1="{left}" x2="{width - 150}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
    for x in range(int(x0), int(x1) + 1):
        px, py = at(x, 0)
        out.append(f'<text x="{px:.1f}" y="{py + 18:.1f}" text-anchor="middle">{x}</text>')
    for x, text in marks:
        if x0 <= x <= x1:
            px, py = at(x, 0)
            out.append(
                f'<line x1="{px:.1f}" x2="{px:.1f}" y1="6" y2="{py:.1f}" stroke="#c4534f" stroke-dasharray="4 3"/>'
            )
            out.append(f'<text x="{px + 4:.1f}" y="18" fill="#c4534f">{escape(text)}</text>')
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in line))
        px, py = at(*line[-1])
        out.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[i % 10]}" stroke-width="2"/>')
        out.append(f'<text x="{px + 6:.1f}" y="{py + 4:.1f}" fill="{_COLOURS[i % 10]}">{escape(name)}</text>')
    out.append(f'<text x="{(width - 80) / 2}" y="{height - 4}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(f'<text x="4" y="{height - 4}">{escape(y_label)}</text>')
    return "\n".join([*out, "</svg>"])
