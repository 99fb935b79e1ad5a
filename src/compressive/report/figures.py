"""Line charts as SVG text, small and without a library.

Colors come from the page's style sheet (classes k0 to k7 of a run, and currentColor), so that one
picture serves light and dark.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape

WIDTH, HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 38  # margins, for the numbers and words at the axes
COLORS = 8
_DASHES = ("", "6 3", "2 3")  # the ninth run has the first one's color, but dashed
MOST = 400  # points of a line: more than pixels it can have

Point = tuple[float, float]


class Line(NamedTuple):
    """One line of a chart, and the run it is of."""

    points: Sequence[Point]
    run: int
    name: str
    mark: float | None = None  # an upright line here, such as a mean
    weights: Sequence[float] = ()  # of the points, drawn as dots of that area


def style(run: int) -> str:
    """Attributes for what is drawn of the run of this number."""
    dash = _DASHES[run // COLORS % len(_DASHES)]
    return f'class="k{run % COLORS}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in the interval: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) or 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{letter}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.4g}".replace("e-0", "e-").replace("-", "\N{MINUS SIGN}")


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST points: means of as many neighbors as it takes."""
    if len(points) <= MOST:
        return list(points)
    parts = np.array_split(np.asarray(points, dtype=np.float64), MOST)
    return [(float(x), float(y)) for x, y in (part.mean(0) for part in parts)]


def chart(
    lines: Sequence[Line],
    x: str,
    y: str,
    *,
    square: bool = False,
    ends: bool = False,
    zero: bool = False,
) -> Markup:
    """Lines over common axes.

    `square` draws the unit square with its diagonal, `ends` a dot where each line ends, and `zero`
    lets the upright axis begin at 0.
    """
    xs = [p[0] for line in lines for p in line.points]
    xs += [line.mark for line in lines if line.mark is not None]
    ys = [p[1] for line in lines for p in line.points] + ([0.0] if zero else [])
    across = (0.0, 1.0) if square else _extent(xs, 0.0)
    upright = (0.0, 1.0) if square else _extent(ys, 0.04, floor=0.0 if zero else None)
    parts = [*_axes(across, upright, x, y)]
    if square:
        parts.append(f'<path class="grid" d="{_path([(0, 0), (1, 1)], across, upright)}"/>')
    for line in lines:
        look = style(line.run)
        title = f"<title>{escape(line.name)}</title>"
        path = _path(line.points, across, upright)
        parts.append(f'<g {look}><path class="line" d="{path}"/>{title}</g>')
        if line.mark is not None:
            at = _place((line.mark, 0), across, upright)[0]
            ends_at = f'y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
            parts.append(f'<g {look}><line class="mean" x1="{at}" x2="{at}" {ends_at}/></g>')
        weighed = zip(line.points, line.weights, strict=bool(line.weights))
        dots = [(point, 9 * math.sqrt(weight)) for point, weight in weighed]
        if ends or len(line.points) == 1:
            dots.append((line.points[-1], 3.5))
        for point, radius in dots:
            cx, cy = _place(point, across, upright)
            dot = f'<circle class="dot" cx="{cx}" cy="{cy}" r="{radius:.1f}"/>'
            parts.append(f"<g {look}>{dot}</g>")
    return svg(parts, f"{y} against {x}: {', '.join(line.name for line in lines)}")


def _extent(
    values: Sequence[float], margin: float, floor: float | None = None
) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: some room on both sides
        room = abs(high) * 0.1 or 1.0
        return low - room if floor is None else min(floor, low), high + room
    room = margin * (high - low)
    return low - room if floor is None else floor, high + room


def _place(point: Point, across: Point, upright: Point) -> tuple[str, str]:
    x = _LEFT + (point[0] - across[0]) / (across[1] - across[0]) * (WIDTH - _LEFT - _RIGHT)
    y = (
        HEIGHT
        - _BOTTOM
        - (point[1] - upright[0]) / (upright[1] - upright[0]) * (HEIGHT - _TOP - _BOTTOM)
    )
    return f"{x:.1f}", f"{y:.1f}"


def _path(points: Sequence[Point], across: Point, upright: Point) -> str:
    return "M" + "L".join(" ".join(_place(point, across, upright)) for point in points)


def _axes(across: Point, upright: Point, x: str, y: str) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in ticks(*upright):
        at = _place((across[0], value), across, upright)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text x="{_LEFT - 5}" y="{at}" dy=".32em" text-anchor="end">{short(value)}</text>'
        )
    for value in ticks(*across):
        at = _place((value, upright[0]), across, upright)[0]
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 15}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle, half = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    turn = f'transform="translate(11 {half:g}) rotate(-90)"'
    parts.append(f'<text {turn} text-anchor="middle">{escape(y)}</text>')
    return parts


def svg(parts: Sequence[str], words: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """A drawing of these parts, and what it shows in words."""
    inside = "".join(parts)
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}">'
        f"{inside}</svg>"
    )
