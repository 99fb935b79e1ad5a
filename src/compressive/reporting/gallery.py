"""Gallery of the report: views, nearest neighbors and a map of the embeddings."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from compressive.reporting.svg import LabelBox, first_free, svg
from compressive.rundir.reader import RunFolder

_DOTS = 4000  # of a map: more would hide each other
_LEGEND_CLASSES = 30  # with more classes, colors are too similar


def views(runs: Sequence[RunFolder]) -> list[tuple[str, list[list[str]]]]:
    """Return names of runs and their views as data URLs; "" if all runs have the same views."""
    groups: dict[tuple[tuple[int, ...], bytes], tuple[list[str], np.ndarray]] = {}
    for run in runs:
        views = run.gallery.get("views")
        if views is not None and views.shape[-1] == 3:
            names, _ = groups.setdefault((views.shape, views.tobytes()), ([], views))
            names.append(run.name)
    found = groups.values()
    return [
        ("" if len(names) == len(runs) else "; ".join(names), [[png(v) for v in r] for r in rows])
        for names, rows in found
    ]


def neighbors(
    runs: Sequence[RunFolder], places: Sequence[int]
) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return position and rows of each of these runs that has neighbors."""
    found = []
    for place in places:
        run = runs[place]
        query, near = run.gallery.get("query"), run.gallery.get("neighbors")
        if query is None or near is None or len(query) != len(near):
            continue
        if query.shape[-1] == near.shape[-1] == 3:
            found.append((place, _neighbor_rows(run, query, near)))
    return found


def _neighbor_rows(run: RunFolder, query: np.ndarray, near: np.ndarray) -> list[dict[str, Any]]:
    """Return image and class of each query and of its neighbors, and whether classes agree."""
    of, others = run.gallery.get("query_label"), run.gallery.get("neighbor_label")
    rows = []
    if of is None or others is None or (len(of), others.shape) != (len(query), near.shape[:2]):
        for image, images in zip(query, near, strict=True):
            shown = [(png(i), "", None) for i in images]
            rows.append({"image": png(image), "name": "", "near": shown})
        return rows
    for image, label, images, labels in zip(query, of, near, others, strict=True):
        row = {"image": png(image), "name": _label_name(int(label), run.classes)}
        pairs = zip(images, labels, strict=True)
        shown = [(png(i), _label_name(int(k), run.classes), bool(k == label)) for i, k in pairs]
        rows.append(row | {"near": shown})
    return rows


class MapDrawing(NamedTuple):
    """The map of a run."""

    run: int
    method: str
    drawing: Markup


def maps(
    runs: Sequence[RunFolder], places: Sequence[int]
) -> tuple[list[MapDrawing], list[tuple[str, str]]]:
    """Return maps of these runs, and name and color of each class, unless there are too many."""
    found, present, names = [], set[int](), list[str]()
    for place in places:
        run = runs[place]
        points, labels = run.gallery.get("map"), run.gallery.get("map_label")
        if points is None or points.shape[1] != 2 or not np.isfinite(points).all(1).any():
            continue
        finite = np.flatnonzero(np.isfinite(points).all(1))
        shown = finite[:: -(-len(finite) // _DOTS)]
        labels = None if labels is None or len(labels) != len(points) else labels[shown]
        if labels is not None:
            present.update(np.unique(labels).tolist())
            names = max(names, run.classes, key=len)
        drawing = scatter(points[shown].astype(np.float64), labels, run.classes)
        found.append(MapDrawing(place, run.gallery_metadata.get("map_method", ""), drawing))
    if len(present) > _LEGEND_CLASSES:
        return found, []
    count = max(len(names), max(present, default=0) + 1)
    return found, [(_label_name(c, names), class_color(c, count)) for c in sorted(present)]


def class_color(label: int, count: int) -> str:
    """Return the color of a class, which is the same on all maps; neighbors differ in lightness."""
    return f"hsl({360 * label / count:.0f} 65% {(42, 58)[label % 2]}%)"


def scatter(points: np.ndarray, labels: np.ndarray | None, names: Sequence[str]) -> Markup:
    """Draw points of a map, with a color and a label per class."""
    low, high = points.min(0), points.max(0)
    span = float((high - low).max()) or 1.0
    room = LabelBox(0, 0, 520, max(160, 24 + 496 * float(high[1] - low[1]) / span))
    middle = np.array([room.right, room.bottom]) / 2
    at = middle + (points - (low + high) / 2) / span * np.array([496, -496])
    groups = np.zeros(len(at), dtype=np.int64) if labels is None else labels
    present = np.unique(groups)
    count = max(len(names), int(present.max()) + 1)
    size = min(9.0, max(2.5, 130 / math.sqrt(len(points))))
    parts, words, taken = [], [], list[LabelBox]()
    for label in present.tolist():
        mine = at[groups == label]
        dots = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in mine)
        color = "var(--soft)" if labels is None else class_color(label, count)
        width = f"stroke-width:{size:.1f}"
        parts.append(f'<path class="dots" stroke="{color}" style="{width}" d="{dots}"/>')
        if labels is not None and len(present) <= _LEGEND_CLASSES:
            word = _label_name(label, names)
            words.append(_class_label(np.median(mine, 0).tolist(), word, color, room, taken))
    return svg(parts + words, "map of the embeddings", int(room.right), int(room.bottom))


def _class_label(
    point: Sequence[float], word: str, hue: str, room: LabelBox, taken: list[LabelBox]
) -> str:
    """Return a label near a point, or "" if there is no space without overlaps.

    A dot before it shows its hue, because it may lie among dots of another class.
    """
    half = 5.0 * len(word) + 8
    x, y = min(max(point[0], half), room.right - half), point[1]
    shifts = (sign * 18 * step for step in range(8) for sign in (1, -1))
    places = (LabelBox(x - half, y + shift - 13, x + half, y + shift + 4) for shift in shifts)
    box = first_free((place for place in places if place.is_within(room)), taken)
    if box is None:
        return ""
    left, base = box.left, box.bottom - 4
    dot = f'<circle class="key" cx="{left + 5:.1f}" cy="{base - 5:.1f}" r="5" fill="{hue}"/>'
    name = f'<text class="over" x="{left + 14:.1f}" y="{base:.1f}">{escape(word)}</text>'
    return dot + name


def _label_name(label: int, names: Sequence[str]) -> str:
    """Return the name of a class, or its number if it has none."""
    return names[label] if 0 <= label < len(names) else str(label)


def png(image: np.ndarray) -> str:
    """Return a data URL of an image given as bytes [height, width, 3]."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(packed)
    return "data:image/png;base64," + base64.b64encode(content).decode()
