"""Line charts as SVG text, without a plotting library.

Colors come from the page's style sheet (classes k0 to k7, and currentColor), so that one drawing
works in light and dark mode.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

CHART_WIDTH, CHART_HEIGHT = 360, 230
_LEFT_EDGE, _RIGHT_EDGE, _TOP_EDGE, _BOTTOM_EDGE = 58, 350, 10, 192  # of the area of the lines
_LETTER = 7  # width of a letter at the axes, in a wide font
COLORS = 8
# Of neighboring lines one is dashed, so that the other is visible where they overlap. With 8 colors
# and 4 patterns, 32 experiments look different.
DASHES = ("", "7 4", "2 3", "9 3 2 3")
MAX_POINTS = 400  # of a line: more than it has pixels

Point = tuple[float, float]


class Line(NamedTuple):
    """One line of a chart."""

    points: Sequence[Point]
    style: int | None  # position of its experiment, which sets color and dashes; None: text color
    name: str
    mark: float | None = None  # x of a vertical line, such as a mean
    weights: Sequence[float] = ()  # areas of dots at the points
    bars: Sequence[float] = ()  # half lengths of error bars
    words: Sequence[str] = ()  # labels of the points
    crosses: Sequence[float] = ()  # x where a point is missing because runs failed


class Drawing(NamedTuple):
    """A titled chart with its numbers."""

    title: str
    svg: Markup
    numbers: Sequence[tuple[int, Any]] = ()  # position of an experiment, and its cell
    styles: Sequence[int | None] = ()  # positions of the experiments that are drawn


def dash(place: int) -> int:
    """Return the number of the dash pattern of the experiment at this position."""
    return (place + place // COLORS) % len(DASHES)


def style(place: int | None) -> str:
    """Return SVG attributes for the experiment at this position."""
    if place is None:
        return 'class="plain"'
    pattern = DASHES[dash(place)]
    return f'class="k{place % COLORS}"' + (f' stroke-dasharray="{pattern}"' if pattern else "")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in an interval, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) or 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def minus(text: str) -> str:
    """Replace hyphens by minus signs, which are as wide as a plus."""
    return text.replace("-", "\N{MINUS SIGN}")


def labels(values: Sequence[float]) -> list[str]:
    """Format numbers for an axis, all in the unit of the largest."""
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
    most = max(map(abs, values), default=0.0)
    size, letter = next((size, letter) for least, size, letter in units if most >= least)
    texts = (f"{value / size:.4g}{letter if value else ''}" for value in values)
    return [minus(text.replace("e-0", "e-")) for text in texts]


def thinned(points: Sequence[Point], middle: Callable[..., Any] = np.mean) -> list[Point]:
    """Reduce a line to at most MAX_POINTS points by averaging neighbors."""
    if len(points) <= MAX_POINTS:
        return list(points)
    parts = np.array_split(np.asarray(points, dtype=np.float64), MAX_POINTS)
    return [(float(x), float(y)) for x, y in (middle(part, axis=0) for part in parts)]


def chart(
    lines: Sequence[Line],
    x: str,
    y: str,
    *,
    square: bool = False,
    ends: bool = False,
    zero: bool = False,
    clip: bool = False,
    names: Sequence[str] = (),
) -> Markup:
    """Draw lines over common axes.

    `square` draws the unit square with its diagonal, `ends` a dot at the end of each line, `zero`
    starts the y axis at 0, `clip` limits the axes if a few points lie far from all others, and
    `names` are the categories at x = 0, 1, 2, ...
    """
    xs = [p[0] for line in lines for p in line.points]
    xs += [line.mark for line in lines if line.mark is not None]
    ys = [p[1] for line in lines for p in line.points]
    ys += [p[1] + s * h for li in lines for p, h in _pairs(li.points, li.bars) for s in (-1, 1)]
    if clip:
        usual = Frame(_central_range(xs), _central_range(ys))
        kept = [p for line in lines for p in line.points if usual.holds(p)]
        kept += [p for line in lines for p in line.points[-1:] if ends]
        xs, ys = [p[0] for p in kept], [p[1] for p in kept]
    # Labels of points need space.
    across = (0.0, 1.0) if square else _extent(xs, 0.1 if any(li.words for li in lines) else 0.0)
    if names:
        across = (-0.5, len(names) - 0.5)
    upright = (0.0, 1.0) if square else _extent(ys, 0.04, floor=0.0 if zero else None)
    frame = Frame(across, upright)
    parts = [*_axes_svg(frame, x, y, names)]
    if square:
        parts.append(f'<path class="grid" d="{_path([(0, 0), (1, 1)], frame)}"/>')
    styles = list(dict.fromkeys(line.style for line in lines))
    for line in lines:
        inside = "".join(_line_elements(line, frame, ends))
        after = len(styles) - 1 - styles.index(line.style)
        wide = 1.8 + 1.4 * after / max(1, len(styles) - 1)  # visible below later lines
        title = f"<title>{escape(line.name)}</title>"
        parts.append(f'<g {style(line.style)} style="--w:{wide:.2f}">{inside}{title}</g>')
    parts += _point_labels(lines, frame)
    return svg(parts, f"{y} against {x}: {', '.join(line.name for line in lines)}")


class Frame(NamedTuple):
    """Ranges of the axes."""

    across: Point
    upright: Point

    def place(self, point: Point) -> Point:
        """Return the pixel position of a point."""
        (left, right), (low, high) = self
        x = (point[0] - left) / (right - left) * (_RIGHT_EDGE - _LEFT_EDGE)
        y = (point[1] - low) / (high - low) * (_BOTTOM_EDGE - _TOP_EDGE)
        return _LEFT_EDGE + x, _BOTTOM_EDGE - y

    def holds(self, point: Point) -> bool:
        """Return whether a point is within the axes."""
        sides = zip(point, self, strict=True)
        return all(low - 1e-9 <= value <= high + 1e-9 for value, (low, high) in sides)


def _line_elements(line: Line, frame: Frame, ends: bool) -> Iterator[str]:
    yield f'<path class="line" d="{_path(line.points, frame)}"/>'
    if line.mark is not None:
        at = f"{frame.place((line.mark, 0))[0]:.1f}"
        yield f'<line class="mean" x1="{at}" x2="{at}" y1="{_TOP_EDGE}" y2="{_BOTTOM_EDGE}"/>'
    for (x, y), half in _pairs(line.points, line.bars):
        (at, low), (_, high) = frame.place((x, y - half)), frame.place((x, y + half))
        yield f'<path class="line" d="M{at:.1f} {low:.1f}V{high:.1f}"/>'
    dots = [(point, 9 * math.sqrt(weight)) for point, weight in _pairs(line.points, line.weights)]
    if ends or len(line.points) == 1:
        dots += [(point, 4.5) for point in line.points[-1:]]
    for point, radius in dots:
        if frame.holds(point):
            x, y = frame.place(point)
            yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    for value in line.crosses:
        x, y = frame.place((value, frame.upright[0]))
        yield f'<path class="line" d="M{x - 4:.1f} {y - 11:.1f}l8 8m0 -8l-8 8"/>'


def _pairs(points: Sequence[Point], values: Sequence[Any]) -> Iterator[tuple[Point, Any]]:
    """Pair points with their values, or return nothing if there are no values."""
    return zip(points, values, strict=True) if values else zip((), (), strict=True)


def _point_labels(lines: Sequence[Line], frame: Frame) -> Iterator[str]:
    """Yield labels next to their points, without overlaps; drop a label if there is no space."""
    marked = [(frame.place(p), word) for li in lines for p, word in _pairs(li.points, li.words)]
    taken = [LabelBox(x - 4, y - 4, x + 4, y + 4) for (x, y), _ in marked]
    room = LabelBox(_LEFT_EDGE, 0, CHART_WIDTH, _BOTTOM_EDGE)
    for (x, y), word in marked:
        wide = _LETTER * len(word)
        corners = ((7, -6), (-7 - wide, -6), (-wide / 2, -18), (-wide / 2, 7))
        places = (LabelBox(x + dx, y + dy, x + dx + wide, y + dy + 13) for dx, dy in corners)
        if box := first_free((place for place in places if place.is_within(room)), taken):
            yield f'<text x="{box.left:.1f}" y="{box.top + 10:.1f}">{escape(word)}</text>'


class LabelBox(NamedTuple):
    """Bounding box of a label, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "LabelBox") -> bool:
        """Return whether two boxes overlap."""
        beside = self.left > other.right or self.right < other.left
        return not (beside or self.top > other.bottom or self.bottom < other.top)

    def is_within(self, other: "LabelBox") -> bool:
        """Return whether the box is inside another one."""
        starts = self.left >= other.left and self.top >= other.top
        return starts and self.right <= other.right and self.bottom <= other.bottom


def first_free(places: Iterable[LabelBox], taken: list[LabelBox]) -> LabelBox | None:
    """Return the first box that overlaps none in `taken`, and append it there."""
    free = next((place for place in places if not any(map(place.meets, taken))), None)
    if free is not None:
        taken.append(free)
    return free


def _central_range(values: Sequence[float]) -> Point:
    """Return the range of all values, or of the central 94 % if outliers widen it much."""
    low, high, least, most = np.quantile(values, [0.03, 0.97, 0.0, 1.0]).tolist()
    if most - least <= 2.5 * (high - low) or high <= low:
        return least, most
    room = 0.25 * (high - low)
    return max(least, low - room), min(most, high + room)


def _extent(values: Sequence[float], margin: float, floor: float | None = None) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # a single value: pad both sides
        room = abs(high) * 0.1 if abs(high) > 1e-300 else 1.0
        return low - room if floor is None else min(floor, low), high + room
    room = margin * (high - low)
    return low - room if floor is None else floor, high + room


def _path(points: Sequence[Point], frame: Frame) -> str:
    """Return SVG path data of a line, clipped to the axes."""
    if all(frame.holds(point) for point in points):
        return "M" + "L".join("{:.1f} {:.1f}".format(*frame.place(point)) for point in points)
    pieces = filter(None, (_clip_segment(*pair, frame) for pair in pairwise(points)))
    places = (frame.place(point) for piece in pieces for point in piece)
    return "".join(f"{'ML'[i % 2]}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))


def _clip_segment(one: Point, two: Point, frame: Frame) -> tuple[Point, Point] | None:
    """Return the part of a segment within the axes (Liang-Barsky)."""
    start, end = 0.0, 1.0
    for a, b, (low, high) in zip(one, two, frame, strict=True):
        if a == b:
            if not low <= a <= high:
                return None
            continue
        first, last = sorted(((low - a) / (b - a), (high - a) / (b - a)))
        start, end = max(start, first), min(end, last)
    if start > end:
        return None
    (ax, ay), (bx, by) = one, two
    first, last = ((ax + t * (bx - ax), ay + t * (by - ay)) for t in (start, end))
    return first, last


def _axes_svg(frame: Frame, x: str, y: str, names: Sequence[str]) -> list[str]:
    left, bottom, right = _LEFT_EDGE, _BOTTOM_EDGE, _RIGHT_EDGE
    parts = []
    heights, places = ticks(*frame.upright), ticks(*frame.across)
    for value, word in zip(heights, labels(heights), strict=True):
        at = f"{frame.place((0, value))[1]:.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{left - 5}" y="{at}" dy=".32em" text-anchor="end">{word}</text>')
    across = list(zip(places, labels(places), strict=True))
    if names:  # categories, thinned out until their labels do not overlap
        apart = frame.place((1, 0))[0] - frame.place((0, 0))[0]
        every = math.ceil((_LETTER * max(map(len, names)) + 8) / apart)
        across = [(float(place), name) for place, name in enumerate(names)][::every]
    for value, word in across:
        at = f"{frame.place((value, 0))[0]:.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 15}" text-anchor="middle">{escape(word)}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle, half = (left + right) / 2, (_TOP_EDGE + bottom) / 2
    base = CHART_HEIGHT - 6
    parts.append(f'<text x="{middle:g}" y="{base}" text-anchor="middle">{escape(x)}</text>')
    turn = f'transform="translate(11 {half:g}) rotate(-90)"'
    parts.append(f'<text {turn} text-anchor="middle">{escape(y)}</text>')
    return parts


def svg(
    parts: Sequence[str], words: str, width: int = CHART_WIDTH, height: int = CHART_HEIGHT
) -> Markup:
    """Wrap elements into an SVG drawing with a text alternative."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")
