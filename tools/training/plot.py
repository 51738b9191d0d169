"""Curves as a small standalone SVG: no plotting library needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 260, 48, 12, 30, 36
COLOURS = ("#2563eb", "#dc2626", "#059669")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points (x, y) under one name."""

    name: str
    points: Sequence[tuple[float, float]]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between low and high."""
    raw = (high - low) / 5 or 1.0
    size = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 10.0 ** -len(str(int(1 / raw)))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    first = int(low / step) + (low > int(low / step) * step)
    return [i * step for i in range(first, int(high / step) + 1)]


def _panel(title: str, x_name: str, curves: Sequence[Curve], x0: int) -> str:
    xs = [x for c in curves for x, _ in c.points]
    ys = sorted(y for c in curves for _, y in c.points)
    low, high = ys[0], ys[min(len(ys) - 1, int(len(ys) * 0.99))]  # the first steps would flatten the rest
    margin = 0.05 * (high - low) or 1.0
    low, high = low - margin, high + margin
    x_max = max(xs)

    def at(x: float, y: float) -> tuple[float, float]:
        across = x0 + LEFT + (WIDTH - LEFT - RIGHT) * x / x_max
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - min(y, high)) / (high - low)

    out = [f'<text x="{x0 + LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for y in _ticks(low, high):
        left, down = at(0, y)
        out.append(f'<path d="M{left:.1f} {down:.1f}H{x0 + WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{left - 6:.1f}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(0, x_max):
        across, down = at(x, low)
        out.append(f'<text x="{across:.1f}" y="{down + 16:.1f}" text-anchor="middle">{x:g}</text>')
    out.append(f'<text x="{x0 + WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_name)}</text>')
    for i, curve in enumerate(curves):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in curve.points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.6"/>')
        out.append(
            f'<text x="{x0 + WIDTH - RIGHT}" y="{TOP + 14 + 15 * i}" text-anchor="end" fill="{COLOURS[i]}">'
            f"{escape(curve.name)}</text>"
        )
    return "\n".join(out)


def svg(panels: Sequence[tuple[str, str, Sequence[Curve]]]) -> str:
    """Panels (title, x axis, curves) side by side."""
    width = WIDTH * len(panels)
    body = "\n".join(_panel(*panel, i * WIDTH) for i, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#111827">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )
