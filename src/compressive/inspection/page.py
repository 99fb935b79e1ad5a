"""The page of an inspection: collect the content of each section, and render it."""

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from compressive.evaluation.frozen_model import FrozenModel
from compressive.inspection.file_facts import file_tables
from compressive.inspection.findings import OUTLIER_NEIGHBORS, Findings
from compressive.inspection.label_errors import VOTERS
from compressive.inspection.tiles import Thumbnails
from compressive.progress import printable
from compressive.reporting.gallery import class_color, scatter
from compressive.reporting.page import page_template
from compressive.reporting.shareable import without_paths
from compressive.rundir.folder import package_version

_SHOWN_GROUPS, _GROUP_TILES = 12, 6  # groups of duplicates that are shown, and images of each
_SHOWN_TILES = 24  # outliers and label errors that are shown
_CLUSTER_TILES = 8
_LISTED = 50  # unreadable files
_LEGEND_NAMES = 30  # classes of the map with a name


class ImageTile(NamedTuple):
    """An image with two lines of text; `where` is its location."""

    image: str
    name: str
    note: str
    where: str


class Card(NamedTuple):
    """One number at the top, with a link to its section."""

    number: str
    text: str
    section: str
    is_problem: bool


class ImageGroup(NamedTuple):
    """Images that belong together."""

    title: str
    note: str
    tiles: Sequence[ImageTile]
    more: int = 0  # images that are not shown


class _Tiles:
    """Make tiles of images of one scan."""

    def __init__(self, found: Findings) -> None:
        self.scan, self.thumbnails = found.scan, Thumbnails(found.scan)

    def tile(self, i: int, note: str, name: str = "") -> ImageTile:
        """Return a tile named by class, else by file."""
        where = printable(Path(self.scan.origin(i)).name)
        name = name or self.scan.class_name(i) or where
        return ImageTile(self.thumbnails.url(i), name, note, where)

    def split(self, i: int) -> str:
        """Return the split of an image, or "" if there is only one."""
        splits = self.scan.splits
        return splits[self.scan.split[i]].name if len(splits) > 1 else ""

    def groups(
        self, groups: Iterable[NDArray[np.int64]], similarity: NDArray[np.float64] | None = None
    ) -> list[ImageGroup]:
        """Return the largest groups; images of all splits of a group are shown."""
        likeness = np.zeros(len(self.scan)) if similarity is None else similarity
        ordered = sorted(groups, key=lambda g: (-len(g), -likeness[g].max()))[:_SHOWN_GROUPS]
        found = []
        for group in ordered:
            # Take turns between splits, so that both sides of a leak are visible.
            rank = np.zeros(len(group), np.int64)
            for split in np.unique(self.scan.split[group]):
                mine = self.scan.split[group] == split
                rank[mine] = np.arange(mine.sum())
            shown = group[np.argsort(rank, kind="stable")][:_GROUP_TILES]
            note = "" if similarity is None else f"similarity {similarity[group].max():.3f}"
            tiles = [self.tile(int(i), self.split(int(i))) for i in shown]
            found.append(ImageGroup("", note, tiles, len(group) - len(shown)))
        return found


def inspection_page(found: Findings, data: str, model: FrozenModel | None, threshold: float) -> str:
    """Return the HTML page."""
    scan, tiles = found.scan, _Tiles(found)
    name = scan.splits[0].source.name
    unreadable = [
        (printable(without_paths(scan.origin(i))), why) for i, why in sorted(scan.reasons.items())
    ]
    drawing, legend = _map_drawing(found)
    content: dict[str, Any] = {
        "title": f"What is in {printable(name)}?",
        "facts": _headline(found),
        "cards": _cards(found),
        "tables": file_tables(scan),
        "unreadable": unreadable[:_LISTED],
        "unreadable_more": max(0, len(unreadable) - _LISTED),
        "leaks": tiles.groups(found.leaks, found.duplicates.similarity),
        "leaks_total": len(found.leaks),
        "exact": tiles.groups(found.exact_groups),
        "exact_total": len(found.exact_groups),
        "near": tiles.groups(found.near_groups, found.duplicates.similarity),
        "near_total": len(found.near_groups),
        "label_errors": _label_tiles(found, tiles),
        "label_errors_total": len(found.label_errors),
        "has_labels": found.labels is not None,
        "outliers": _outlier_tiles(found, tiles),
        "clusters": _cluster_groups(found, tiles),
        "map": drawing,
        "map_legend": legend,
        "map_count": 0 if found.map_images is None else len(found.map_images),
        "is_by_class": found.labels is not None,
        "encoder": None if model is None else without_paths(model.name),
        "encoder_size": 0 if model is None else model.size,
        "is_small_encoder": model is not None and model.size <= 64 and _median_side(found) > 128,
        "voters": VOTERS,
        "outlier_neighbors": OUTLIER_NEIGHBORS,
        "threshold": threshold,
        "origins": _origins(data, model),
    }
    return page_template("compressive.inspection").render(content)


def _headline(found: Findings) -> str:
    scan = found.scan
    words = [f"{len(scan):,} images"]
    if len(scan.splits) > 1:
        words.append(", ".join(f"{s.name} {len(s.source):,}" for s in scan.splits))
    if scan.classes:
        words.append(f"{len(scan.classes):,} classes")
    return "; ".join([*words, f"{date.today():%Y-%m-%d}"])


def _cards(found: Findings) -> list[Card]:
    """Return the numbers at the top."""
    scan = found.scan
    copies = sum(len(group) - 1 for group in found.exact_groups)
    near = sum(len(group) for group in found.near_groups)
    cards = [
        Card(f"{len(scan.reasons):,}", "unreadable files", "unreadable", bool(scan.reasons)),
        Card(f"{copies:,}", "exact copies of other images", "exact", copies > 0),
        Card(f"{near:,}", "images in groups of near duplicates", "near", near > 0),
    ]
    if len(scan.splits) > 1:
        test = sum(int((scan.split[group] > 0).sum()) for group in found.leaks)
        text = f"images outside of {scan.splits[0].name} that are also in another split"
        cards.append(Card(f"{test:,}", text, "leaks", test > 0))
    if found.labels is not None:
        count = len(found.label_errors)
        cards.append(Card(f"{count:,}", "likely label errors", "labels", count > 0))
    return cards


def _label_tiles(found: Findings, tiles: _Tiles) -> list[ImageTile]:
    if found.labels is None:
        return []
    made = []
    for i in found.label_errors[:_SHOWN_TILES]:
        other = found.scan.classes[found.labels.suggested[i]]
        made.append(tiles.tile(int(i), f"neighbors: {other}"))
    return made


def _outlier_tiles(found: Findings, tiles: _Tiles) -> list[ImageTile]:
    if found.outlier_score is None:
        return []
    scores = found.outlier_score
    return [tiles.tile(int(i), f"score {scores[i]:.3f}") for i in found.outliers[:_SHOWN_TILES]]


def _cluster_groups(found: Findings, tiles: _Tiles) -> list[ImageGroup]:
    """Return clusters with their most typical images."""
    if found.cluster is None or found.typicality is None:
        return []
    scan, groups = found.scan, []
    # Of equal images only the first one is shown.
    is_first = np.ones(len(scan), bool)
    for copies in found.exact_groups:
        is_first[copies[1:]] = False
    for number in range(found.cluster.max() + 1):
        members = np.flatnonzero(found.cluster == number)
        counts = Counter(name for i in members if (name := scan.class_name(int(i))))
        parts = [f"{name} {n / len(members):.0%}" for name, n in counts.most_common(3)]
        shown = members[is_first[members]]
        shown = shown[np.argsort(-found.typicality[shown], kind="stable")][:_CLUSTER_TILES]
        title = f"Cluster {number}: {len(members):,} images"
        made = [tiles.tile(int(i), "") for i in shown]
        groups.append(ImageGroup(title, ", ".join(parts), made))
    return groups


def _map_drawing(found: Findings) -> tuple[Any, list[tuple[str, str]]]:
    """Return the map and its legend: classes if there are labels, else clusters."""
    if found.map_points is None or found.map_images is None or found.cluster is None:
        return None, []
    scan = found.scan
    if found.labels is None:
        colors = found.cluster[found.map_images]
        names = [f"cluster {k}" for k in range(found.cluster.max() + 1)]
    else:
        colors = scan.label[found.map_images]
        names = list(scan.classes)
        colors = np.where(colors < 0, len(names), colors)
        names += ["no label"] if (colors == len(names)).any() else []
    present = np.unique(colors).tolist()
    legend = [(names[k], class_color(k, len(names))) for k in present]
    drawing = scatter(found.map_points, colors, names)
    return drawing, legend if len(present) <= _LEGEND_NAMES else []


def _median_side(found: Findings) -> float:
    scan = found.scan
    sides = np.maximum(scan.width, scan.height)[scan.readable]
    return float(np.median(sides)) if len(sides) else 0.0


def _origins(data: str, model: FrozenModel | None) -> list[tuple[str, str]]:
    found = {
        "data": without_paths(data),
        "encoder": "none" if model is None else without_paths(model.name),
        "compressive": package_version("compressive"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    return list(found.items())
