"""The figures as one SVG: throughput, time to first token and time per token over load, a line per K and prefix."""

import math
from collections.abc import Callable, Sequence
from html import escape

from serving.bench.point import Load, Point

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 62, 46, 78
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
PANELS: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("tokens/s", lambda p: p.tokens_per_s),
    ("time to first token, p50 [ms]", lambda p: p.first.p50),
    ("time per output token, p50 [ms]", lambda p: p.per_token.p50),
)
LOADS = {"offline": "requests at once", "online": "requests per second"}


def series_name(load: Load) -> str:
    """What a line of the plot is called."""
    return f"{'K=?' if load.k is None else f'K={load.k}'}, {load.prefix} prefix"


def _nice(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _panel(x: float, y: float, title: str, below: str, lines: dict[str, list[tuple[float, float]]], colours: dict[str, str]) -> list[str]:  # fmt: skip
    points = [point for line in lines.values() for point in line]
    levels = sorted({level for level, _ in points})
    top = _nice(max((value for _, value in points), default=1.0) or 1.0)
    low, high = math.log2(levels[0]), math.log2(levels[-1])

    def at(level: float, value: float) -> tuple[float, float]:
        across = 0.5 if low == high else (math.log2(level) - low) / (high - low)
        return x + 12 + across * (WIDTH - 24), y + HEIGHT * (1 - value / top)

    out = [f'<text x="{x}" y="{y - 10}" class="title">{escape(title)}</text>']
    for part in range(5):
        value, height = top * part / 4, y + HEIGHT * (1 - part / 4)
        out.append(f'<path d="M{x} {height:.1f}h{WIDTH}" class="grid"/>')
        out.append(f'<text x="{x - 6}" y="{height + 4:.1f}" class="end">{value:g}</text>')
    for level in levels:
        out.append(f'<text x="{at(level, 0)[0]:.1f}" y="{y + HEIGHT + 16}" class="middle">{level:g}</text>')
    out.append(f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 34}" class="middle">{escape(below)}</text>')
    for name, line in lines.items():
        places = [at(level, value) for level, value in sorted(line)]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        out.append(f'<path d="M{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colours[name]}"/>' for px, py in places]
    return out


def draw(points: Sequence[Point], title: str) -> str:
    """An SVG document: a row of panels per mode, loads on a logarithmic axis."""
    names = list(dict.fromkeys(series_name(point.load) for point in points))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    modes = list(dict.fromkeys(point.load.mode for point in points))
    total = (LEFT + len(PANELS) * (WIDTH + GAP), TOP + 30 + len(modes) * (HEIGHT + GAP))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}" font-family="system-ui, sans-serif" font-size="12">',
        "<style>.grid{stroke:#ddd}.title{font-weight:600}.end{text-anchor:end;fill:#555}.middle{text-anchor:middle;fill:#555}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        x = LEFT + i * 190
        out.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colours[name]}"/>')
        out.append(f'<text x="{x + 18}" y="40">{escape(name)}</text>')
    for row, mode in enumerate(modes):
        for column, (what, figure) in enumerate(PANELS):
            lines: dict[str, list[tuple[float, float]]] = {}
            for point in points:
                if point.load.mode == mode and not math.isnan(figure(point)):
                    lines.setdefault(series_name(point.load), []).append((point.load.level, figure(point)))
            if lines:
                place = LEFT + column * (WIDTH + GAP), TOP + 30 + row * (HEIGHT + GAP)
                out += _panel(*place, f"{mode}: {what}", LOADS[mode], lines, colours)
    return "\n".join([*out, "</svg>", ""])
